"""What people see of a run: the report and the live page, from one renderer. Read-only."""
