"""Where later revisions begin. It makes nothing: a new database is made from `rollmill/storage/tables.py`."""

revision = "0015"  # those up to 0014 are not read
down_revision = None
