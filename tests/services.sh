#!/bin/sh
# Install what the tests start themselves (Redis, a C++ compiler, a browser), where this machine lets us.
# Elsewhere the tests that need one skip and say so.
set -u
# axe-core judges the pages' accessibility in the browser tests; the version is fixed, so that a new rule breaks no old page.
axe=out/npm/node_modules/axe-core/axe.min.js
if [ ! -e "$axe" ]; then
  if command -v npm >/dev/null; then
    timeout 60 npm install --silent --no-audit --no-fund --no-save --prefix out/npm axe-core@4.14.1 >/dev/null 2>&1 || echo "could not install: axe-core (npm)"
  else
    echo "not installed: axe-core (no npm here)"
  fi
fi
missing=""
command -v redis-server >/dev/null || missing="$missing redis-server"
command -v g++ >/dev/null || missing="$missing g++"
command -v chromium >/dev/null || missing="$missing chromium fonts-dejavu-core"
command -v ip >/dev/null || missing="$missing iproute2"
command -v sshd >/dev/null || [ -x /usr/sbin/sshd ] || missing="$missing openssh-server openssh-client"
command -v rsync >/dev/null || missing="$missing rsync"
command -v mkfs.btrfs >/dev/null || [ -x /sbin/mkfs.btrfs ] || missing="$missing btrfs-progs"
[ -z "$missing" ] && exit 0
command -v apt-get >/dev/null || { echo "not installed:$missing (no apt here; environment.yml lists them)"; exit 0; }
if [ "$(id -u)" = 0 ]; then sudo=""; elif sudo -n true 2>/dev/null; then sudo="sudo -n"; else echo "not installed:$missing (needs root)"; exit 0; fi
export DEBIAN_FRONTEND=noninteractive
$sudo apt-get update -qq && $sudo apt-get install -y -qq --no-install-recommends $missing >/dev/null || echo "could not install:$missing"
