#!/bin/sh
# The manager of one run. A StatefulSet starts every container again that ends: so once training is over this one waits.
# Usage: manager.sh AGENTS NODES ADDRESS RUN_DIR SCRIPT [ARGS]...
agents=$1 nodes=$2 address=$3 run_dir=$4
shift 4
process= leaving=
trap 'leaving=yes; [ -z "$process" ] || kill -TERM "$process" 2>/dev/null' TERM INT

await() { # until the process has ended; a signal interrupts wait
  wait "$process"
  code=$?
  while kill -0 "$process" 2>/dev/null; do
    wait "$process"
    code=$?
  done
}

if [ ! -e "$run_dir/finished" ]; then
  varuna run --on "k8s:$agents" --nodes "$nodes" --port 7070 --advertise "$address" --run-dir "$run_dir" "$@" &
  process=$!
  [ -z "$leaving" ] || kill -TERM "$process" # it came before there was anything to end
  await
  [ -z "$leaving" ] || exit 0 # the pod goes; the next one manages the run on
  [ "$code" -eq 0 ] || exit "$code"
  touch "$run_dir/finished"
fi
echo "training is over; remove $run_dir/finished and this pod to go on, or uninstall the release"
process=
while [ -z "$leaving" ]; do
  sleep 1 &
  wait $!
done
exit 0
