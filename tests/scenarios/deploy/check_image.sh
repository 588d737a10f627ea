#!/usr/bin/env bash
# Builds deploy/Dockerfile for CPUs without a container engine, and tries what came out as the chart's pods run it: as user
# 1000, without capabilities, with a read-only root file system and a volume at /tmp. As root; needs buildah and debootstrap.
# Usage: check_image.sh FOLDER   (some 5 GB; it is kept, and used again)
set -euo pipefail
cd "$(dirname "$0")/../../.."
folder=$(realpath -m "$1") suite=bookworm torch=torch==2.13.0
for tool in buildah debootstrap unshare setpriv; do
  command -v "$tool" >/dev/null || { echo "image-check needs $tool: apt-get install buildah debootstrap util-linux" >&2; exit 2; }
done
[ "$(id -u)" = 0 ] || { echo "image-check makes mount namespaces, so it needs root" >&2; exit 2; }
mkdir -p "$folder"
store() { buildah --root "$folder/store" --runroot "$folder/run" --storage-driver vfs "$@"; }

echo "== what stands in for python:3.11-slim, which no registry gives here: Debian $suite with its own Python 3.11"
if ! store images -q python:3.11-slim >/dev/null 2>&1; then
  rm -rf "$folder/base"
  debootstrap --variant=minbase --include=python3,python3-pip,ca-certificates "$suite" "$folder/base" >"$folder/base.log"
  rm "$folder"/base/usr/lib/python3*/EXTERNALLY-MANAGED
  ln -s /usr/bin/python3 "$folder/base/usr/local/bin/python"
  made=$(store from scratch)
  store add -q "$made" "$folder/base" / >/dev/null
  store config --env PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin "$made"
  store commit -q "$made" docker.io/library/python:3.11-slim >/dev/null
  store rm "$made" >/dev/null
  rm -rf "$folder/base"
fi

echo "== build"
# pip takes the wheel of torch that this machine's pip has or gets.
mkdir -p "$folder/wheels"
pip download -q --dest "$folder/wheels" "$torch"
{ cat /etc/pip.conf 2>/dev/null || echo "[global]"; printf 'find-links = /wheels\nretries = 0\n'; } >"$folder/pip.conf"
build() {
  store build --isolation chroot --pull-never --volume "$folder/wheels:/wheels:ro" --volume "$folder/pip.conf:/etc/pip.conf:ro" \
    --volume /etc/ssl/certs:/etc/ssl/certs:ro "$@" >"$folder/build.log" 2>&1 || { tail -20 "$folder/build.log" >&2; exit 1; }
}
build -f deploy/Dockerfile -t varuna .
# As the Dockerfile says that a job's image is made.
mkdir -p "$folder/job"
cp examples/packed_documents.py "$folder/job/train.py"
printf 'FROM varuna\nCOPY train.py /job/\nRUN pip install --no-cache-dir transformers\n' >"$folder/job/Dockerfile"
build -f "$folder/job/Dockerfile" -t job "$folder/job"
store images

root=$(store mount "$(store from --pull-never job)")
trap 'store umount -a >/dev/null; store rm -a >/dev/null' EXIT
pod() { # VOLUMES COMMAND...
  volumes=$1
  shift
  unshare --mount --pid --ipc --fork sh -ec '
    root=$1 volumes=$2; shift 2
    mount --bind "$root" "$root"
    mount -o remount,bind,ro "$root"
    mount -t proc proc "$root/proc"
    mount -t tmpfs tmpfs "$root/dev"
    mkdir "$root/dev/shm"
    mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
    for one in null zero full random urandom; do touch "$root/dev/$one"; mount --bind "/dev/$one" "$root/dev/$one"; done
    for one in $volumes; do mount -t tmpfs -o mode=1777 tmpfs "$root$one"; done
    exec chroot "$root" setpriv --reuid 1000 --regid 1000 --init-groups --inh-caps=-all --bounding-set=-all --no-new-privs \
      env -i PATH=/usr/local/bin:/usr/bin:/bin HOME=/home/varuna sh -c "cd /job && exec \"\$@\"" sh "$@"
  ' sh "$root" "$volumes" "$@"
}

echo "== as a pod, read-only"
pod "" varuna --version
pod "" varuna --help >/dev/null
if said=$(pod "" varuna run --workers 2 train.py 2>&1); then echo "a run without a folder for temporary files?" >&2; exit 1; fi
case $said in *Traceback* | *"internal error"*) echo "not said well: $said" >&2; exit 1 ;; esac
echo "$said"
pod /tmp sh -c 'varuna run --workers 2 --run-dir /tmp/run train.py && varuna doctor --quick --run /tmp/run' | tail -15
pod /tmp varuna demo --steps 60 --output /tmp/demo | tail -12
echo "== the image does what the chart needs"
