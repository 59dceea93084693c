# shellcheck shell=sh
# In both images as /etc/profile.d/rlpipe.sh.
PATH="/opt/rlpipe/.venv/bin:/usr/local/cuda/bin:$PATH"
export PATH
