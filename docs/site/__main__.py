"""Builds the documentation as a site: ``python -m docs.site``, which is ``make docs``.

The pages of docs/, and some that are made from the code, are laid out in build/; Zensical makes the site of them and
refuses links and anchors that lead nowhere; what it made is read once more for anything that a browser would fetch from
elsewhere. llms.txt, beside the pages, says to programs what there is.
"""

import subprocess
import sys
from pathlib import Path

from docs.site.built import fetched_from_elsewhere, torn
from docs.site.llms import write_llms
from docs.site.staging import GENERATED, stage

ROOT = Path(__file__).parents[2]


def main() -> int:
    """0 if the site is whole."""
    site = ROOT / "build" / "docs" / "site"
    config = stage(ROOT, ROOT / "build" / "docs")
    builder = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", str(config)]
    if subprocess.run(builder, cwd=config.parent, check=False).returncode:
        print("The site is not built: mend the links above, in docs/ or in the code's docstrings.", file=sys.stderr)
        return 1
    if found := fetched_from_elsewhere(site):
        print("Pages of the site would fetch from elsewhere:", *found, sep="\n  ", file=sys.stderr)
        return 1
    if found := torn(site):
        print("A heading on these pages is too long for the table of contents:", *found, sep="\n  ", file=sys.stderr)
        return 1
    write_llms(config.parent / "pages", site, {title: path for title, (path, _) in GENERATED.items()})
    print(
        f"{len(list(site.rglob('*.html')))} pages in {site}. Open {site / 'index.html'}, or serve them: "
        f"python -m http.server --directory {site}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
