"""The command line in this process."""

from flowcorr.cli import main


def run(capsys, *arguments):
    """Exit code, stdout and stderr of `flowcorr *arguments`."""
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err
