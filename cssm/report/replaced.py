"""What a command may put a file of its own in the place of, and which folders it may fill."""

from pathlib import Path

from cssm.config import UserError

LOOKED_AT = 2048  # bytes at the beginning of a file


def check_replaced(path: Path, mark: str) -> None:
    """UserError where --output names a file that is not of this command: one without the mark that its files have near
    their beginning. An empty file is nobody's.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        beginning = file.read(LOOKED_AT)
    if beginning and mark.encode() not in beginning:
        raise UserError(
            f"--output {path} is there already, and not of this command, which replaces only what it wrote: type "
            "another name"
        )


def check_folder(flag: str, folder: Path) -> None:
    """UserError where the flag names a file, or a folder that holds something."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{flag} {folder} exists already and is not overwritten: type another folder")
