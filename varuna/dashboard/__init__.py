"""The web page: static files, served by the manager."""

from pathlib import Path

PAGE = Path(__file__).with_name("index.html")
