"""The web page: static files, served by the manager."""
