#!/bin/sh
# Entry point of a container that serves the cards it was given, beside the engines' containers.
# Needs: a shared run directory (KVFERRY_RUN_DIR, same user in both), a shared PID namespace and
# /dev/shm (--pid, --ipc), so that each side may map the other's memory and see it die.
#
#   KVFERRY_DEVICES   for example npu:0-7; ASCEND_RT_VISIBLE_DEVICES restricts it
#   KVFERRY_RUN_DIR   directory of the sockets
#   further arguments go to each `kvworker serve`
set -eu
: "${KVFERRY_DEVICES:?for example npu:0-7}"
: "${KVFERRY_RUN_DIR:=/run/kvferry}"
export KVFERRY_RUN_DIR
mkdir -p "$KVFERRY_RUN_DIR"
chmod 700 "$KVFERRY_RUN_DIR"
exec kvworker up --devices "$KVFERRY_DEVICES" "$@"
