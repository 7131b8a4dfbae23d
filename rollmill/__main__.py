"""`python -m rollmill`: the command, also where its script is not on PATH."""

from rollmill.cli.main import main

main()
