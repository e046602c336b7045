"""Data parallelism on a CPU: single-threaded processes share a batch. Faster than threads for small models."""

import ctypes
import importlib
import logging
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rstar_lab.common.errors import UserError
from rstar_lab.common.temporary import SHARED_MEMORY, LockedFolder
from rstar_lab.hardware.processes import GONE, wait_or_kill

_TIMEOUT = timedelta(days=7)  # helpers wait during rollouts; a dead helper closes its connection at once
STOPPED_S = 20.0
LOG = logging.getLogger(__name__)
