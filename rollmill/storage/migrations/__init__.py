"""The database schema as a chain of Alembic revisions. `open_database` runs the ones a database does not have yet.

A new database is made from `rollmill/storage/tables.py` and gets the newest revision; revisions are for databases that
exist. A change of the schema is a change of the tables and a new file in `versions`: the next number, `down_revision`
names the one before, `upgrade` makes the change with `alembic.op` on SQLite and PostgreSQL. A test compares the two.
A revision that has been released is never edited. Upgrades keep all rows.
There is no downgrade: an older rollmill refuses a newer database. Databases from before the first revision are refused.
"""
