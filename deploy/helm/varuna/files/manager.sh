#!/bin/sh
# The manager of one run. A StatefulSet starts every container again that ends: so once training is over this one waits,
# and so it does once the run has failed for good. It may be tried again a few times: what failed may have been a disk.
# Usage: manager.sh AGENTS NODES ADDRESS RUN_DIR SCRIPT [ARGS]...
agents=$1 nodes=$2 address=$3 run_dir=$4
shift 4
tries=5
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

fail() { # with an exit code of varuna; returns only if there is to be no further try
  mkdir -p "$run_dir"
  echo "$1" >>"$run_dir/failures"
  case $1 in
    2 | 3) ;; # wrong use, or no plan fits: the next try would say the same
    *) [ "$(wc -l <"$run_dir/failures")" -ge "$tries" ] || exit "$1" ;;
  esac
  mv "$run_dir/failures" "$run_dir/failed" || exit "$1"
}

if [ ! -e "$run_dir/finished" ] && [ ! -e "$run_dir/failed" ]; then
  varuna run --on "k8s:$agents" --nodes "$nodes" --port 7070 --advertise "$address" --run-dir "$run_dir" "$@" &
  process=$!
  [ -z "$leaving" ] || kill -TERM "$process" # it came before there was anything to end
  await
  [ -z "$leaving" ] || exit 0 # the pod goes; the next one manages the run on
  [ "$code" -lt 128 ] || exit "$code" # killed, perhaps for want of memory: the run itself goes on
  if [ "$code" -eq 0 ]; then touch "$run_dir/finished"; else fail "$code"; fi
fi
if [ -e "$run_dir/failed" ]; then
  end=failed
  echo "the run failed with exit code $(tail -n 1 "$run_dir/failed"), and is not tried again; find out why (varuna logs)"
else
  end=finished
  echo "training is over"
fi
echo "remove $run_dir/$end and this pod to go on, or uninstall the release"
process=
while [ -z "$leaving" ]; do
  sleep 1 &
  wait $!
done
exit 0
