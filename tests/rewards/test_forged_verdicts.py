# ruff: noqa: E501 (programs, one a line)
"""Programs that try to pass tests without solving anything, and honest ones that must not suffer from the defence."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rewards
from rewards.sandbox.program import Limits, Program, namespaces_work, run_python

pytestmark = pytest.mark.skipif(not namespaces_work(), reason="this machine permits no namespaces")

TEST = "assert add(1, 2) == 3\nassert add(5, 6) == 11"

LENIENT = """
class Same:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __eq__
    __hash__ = lambda self: 0
    def __sub__(self, other): return self
    __abs__ = __rsub__ = __add__ = lambda self, *_: self
    def __iter__(self): return iter([self])
    def __getattr__(self, name): return self
    def __call__(self, *args): return self
    def __instancecheck__(self, other): return True
"""
FORGERS = {
    "reads the source": "print(open('main.py').read()); print(open(__file__).read())\ndef add(a, b): return 0",
    "prints all it finds": "import os, sys\nfor f in os.listdir('.'): print(open(f).read(), flush=True)\ndef add(a, b): 0",
    "re-executes with -O": "import os, sys\nos.execv(sys.executable, [sys.executable, '-O', 'main.py'])",
    "runs itself with -O": "import subprocess, sys\nsubprocess.run([sys.executable, '-O', 'main.py'])\nadd = lambda a, b: 0",
    "is equal to everything": LENIENT + "def add(a, b): return Same()",
    "is everything itself": LENIENT + "add = Same()",
    "is an int that is equal": "class I(int):\n    def __eq__(self, o): return True\ndef add(a, b): return I(0)",
    "is a str that is equal": "class S(str):\n    def __eq__(self, o): return True\ndef add(a, b): return S('')",
    "is a list that is equal": "class L(list):\n    def __eq__(self, o): return True\ndef add(a, b): return L()",
    "at exit": "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): raise SystemExit(0)",
    "leaves": "import os\ndef add(a, b): os._exit(0)",
    "exits": "import sys\nsys.exit(0)",
    "exits in the call": "import sys\ndef add(a, b): sys.exit(0)",
    "traces": (
        "import sys, threading\ndef trace(frame, *_):\n    for name in list(frame.f_locals): frame.f_locals[name] = 3\n"
        "    return trace\nsys.settrace(trace); threading.settrace(trace)\ndef add(a, b): return 0"
    ),
    "walks the frames": (
        "import sys\ndef add(a, b):\n    frame = sys._getframe()\n    while frame:\n"
        "        for value in list(frame.f_locals.values()) + list(frame.f_globals.values()):\n"
        "            if isinstance(value, str) and len(value) == 32: print(value, flush=True)\n"
        "        frame = frame.f_back\n    return 0"
    ),
    "walks the heap": (
        "import gc\ndef add(a, b):\n    for one in gc.get_objects():\n"
        "        if isinstance(one, dict) and 'word' in one: print(one['word'], flush=True)\n    return 0"
    ),
    "reads /proc": (
        "import glob\ndef add(a, b):\n    for path in glob.glob('/proc/*/environ') + glob.glob('/proc/*/cmdline') + "
        "glob.glob('/proc/*/fd/*'):\n        try: print(open(path, errors='replace').read(), flush=True)\n"
        "        except OSError: pass\n    return 0"
    ),
    "writes into every descriptor": (
        "import os, re\ndef add(a, b):\n    for fd in range(64):\n        try: os.write(fd, b'0' * 32 + b'\\n')\n"
        "        except OSError: pass\n    return 0"
    ),
    "replaces builtins": (
        "import builtins\nbuiltins.AssertionError = type('Never', (Exception,), {})\nbuiltins.print = builtins.compile = "
        "lambda *a, **k: None\nbuiltins.isinstance = builtins.all = builtins.bool = lambda *a: True\ndef add(a, b): return 0"
    ),
    "replaces operators of int by ctypes": (
        "import ctypes\ntry:\n    ctypes.c_long.from_address(id(11) + 24).value = 0\n"
        "    ctypes.c_long.from_address(id(3) + 24).value = 0\nexcept Exception: pass\ndef add(a, b): return 0"
    ),
    "answers in the name of the loader": (
        "import json, os, struct\ndef say(m):\n    b = json.dumps(m).encode(); os.write(4, struct.pack('!I', len(b)) + b)\n"
        "say(['loaded', [['add', ['unittest.mock', 'ANY']]]])\nsay(['answer', 1, True, {}])\nsay(['answer', 2, ['yours', 0], {}])"
    ),
    "says that it was imported": "from unittest.mock import MagicMock as add",
    "is any object of mock": "from unittest.mock import ANY\ndef add(a, b): return ANY",
    "sends objects of the tests": (
        "import json, os, struct\ndef add(a, b):\n    b = json.dumps(['answer', 1, ['yours', 0], {}]).encode()\n"
        "    os.write(4, struct.pack('!I', len(b)) + b)\n    return 0"
    ),
    "asks for evaluation": (
        "import sys\ndef add(a, b):\n    peer = [f for f in __import__('gc').get_objects() if type(f).__name__ == 'Peer'][0]\n"
        "    for n in range(5):\n        for op in ('getattr', 'call', 'special', 'global'):\n"
        "            try: peer.ask(op, 'x', ('import os; os._exit(0)',), {})\n            except Exception: pass\n    return 0"
    ),
    "nests deeply": "import os, struct\ndef add(a, b):\n    m = b'[' * 10**6\n    os.write(4, struct.pack('!I', len(m)) + m); return 0",
    "promises much": "import os, struct\ndef add(a, b):\n    os.write(4, struct.pack('!I', 2**32 - 1)); return 0",
    "kills the judge": (
        "import os\ndef add(a, b):\n    for pid in range(1, 40):\n        if pid != os.getpid():\n"
        "            try: os.kill(pid, 9)\n            except OSError: pass\n    return 0"
    ),
    "stops itself": "import os, signal\ndef add(a, b): os.kill(os.getpid(), signal.SIGSTOP)",
    "kills its parent": "import os\nos.kill(os.getppid(), 9)\nos.kill(1, 9)\ndef add(a, b): return 0",
    "lets threads live": (
        "import threading, time\nfor _ in range(8): threading.Thread(target=time.sleep, args=(1000,)).start()\n"
        "def add(a, b): return 0"
    ),
    "forks in the call": "import os\ndef add(a, b): os.fork(); return 3 if os.getpid() % 2 else 0",
    "is a fork bomb": "import os\ndef add(a, b):\n    while True:\n        try: os.fork()\n        except OSError: pass",
    "exhausts descriptors": "import os\nwhile True: os.dup(0)",
    "fills memory": "def add(a, b): return 'x' * 2**33",
    "answers without end": "def add(a, b):\n    while True: yield 3",
    "answers much": "def add(a, b): return 'x' * 2**27",
    "follows links": (
        "import os\nfor t in ('/proc/self/exe', '/proc/1/root', '/etc', '/dev/mem', '/sys'):\n    os.symlink(t, t.replace('/', '_'))\n"
        "    try: print(os.listdir(t.replace('/', '_')))\n    except OSError: pass\ndef add(a, b): return 0"
    ),
    "becomes dumpable": (
        "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.prctl(4, 1, 0, 0, 0); libc.prctl(22, 0, 0, 0, 0); libc.prctl(38, 0, 0, 0, 0)\n"
        "def add(a, b): return 0"
    ),
    "pickles a bomb": "import os, pickle\nclass B:\n    def __reduce__(self): return os._exit, (0,)\ndef add(a, b): return B()",
    "redefines what tests use": "def add(a, b): return 0\ndef all(x): return True\nlen = sum = abs = lambda *a: 3",
}


@pytest.mark.parametrize("source", FORGERS.values(), ids=FORGERS)
def test_a_program_that_solves_nothing_passes_nothing(source: str) -> None:
    reward = rewards.grade("code", f"```python\n{source}\n```", TEST, wall_seconds=2.0)
    assert (reward.score, reward.correct) == (0.0, False), reward.reason


@pytest.mark.parametrize(
    ("source", "test"),
    [
        (LENIENT + "def f(x): return Same()", "assert abs(f(1) - 2.5) < 1e-6"),
        (LENIENT + "def f(x): return Same()", "assert 7 in f(1)"),
        (LENIENT + "def f(x): return Same()", "import math\nassert math.isclose(f(1), 2.5)"),
        (
            LENIENT + "isclose = lambda *a: True\ndef f(x): return 0",
            "from math import isclose\nassert isclose(f(1), 2.5)",
        ),
        ("import math\nmath.isclose = lambda *a: True\ndef f(x): return 0", "assert math.isclose(f(1), 2.5)"),
        ("def all(x): return True\ndef f(x): return 0", "assert all(f(x) == x for x in (1, 2))"),
        ("def set(x): return 0\ndef f(x): return [0]", "assert set(f(1)) == set([1, 2])"),
        (LENIENT + "def f(x): return {'a': Same()}", "assert f(1) == {'a': 5}"),
        (LENIENT + "def f(x): return [Same(), Same()]", "assert sorted(f(1)) == [1, 2]"),
        (LENIENT + "class E(Exception): pass\ndef f(x): raise E", "try:\n    f(1)\nexcept ValueError:\n    pass"),
        ("def f(x): raise StopIteration", "assert all(map(lambda x: f(x) == 2 * x, (1, 2)))"),
        ("class End(StopIteration): pass\ndef f(x): raise End", "assert not any(map(lambda x: f(x) != 2, (1, 2)))"),
        (
            "class F:\n    def __getitem__(self, i): raise StopIteration\nf = F()",
            "assert all(map(lambda x: f[x] == 2 * x, (1, 2)))",
        ),
        ("def f(x): return 1", "try:\n    f(1)\n    assert False\nexcept ValueError:\n    pass"),
    ],
)
def test_what_a_program_defines_decides_no_comparison(source: str, test: str) -> None:
    reward = rewards.grade("code", f"```python\n{source}\n```", test, wall_seconds=20.0)
    assert reward.correct is False, reward.reason


HONEST = {
    "humaneval": (
        "def add(a, b):\n    return a + b",
        "METADATA = {}\n\ndef check(candidate):\n    assert candidate(1, 2) == 3\n    assert candidate('a', 'b') == 'ab'\n\n"
        "check(add)",
    ),
    "named like a builtin": ("def sum(a, b): return a * b", "assert sum(10, 15) == 150"),
    "a builtin handed on": (
        "def sum(a, b): return a * b",
        "def check(candidate):\n    assert candidate(2, 3) == 6\ncheck(sum)",
    ),
    "changes its argument": (
        "def f(x): x.sort(); x.append(9)",
        "v = [3, 1]\nassert f(v) is None\nassert v == [1, 3, 9]",
    ),
    "changes a mapping": ("def f(x): x['b'] = [2]", "v = {'a': 1}\nf(v)\nassert v == {'a': 1, 'b': [2]}"),
    "plain types": (
        "import collections\ndef f(x): return x\nclass P(collections.namedtuple('P', 'a b')): pass\ndef g(): return P(1, 2)",
        "import decimal, datetime, fractions, collections\n"
        "for v in (1, -2**70, 1.5, 'é\\ud800', b'x', None, True, 1j, [1, (2, {3})], {1: {'a': frozenset([1])}}, range(3),\n"
        "          decimal.Decimal('1.10'), fractions.Fraction(1, 3), datetime.date(2020, 1, 2), 10**5000,\n"
        "          datetime.timedelta(3, 4), collections.Counter('aab'), collections.deque([1, 2])):\n"
        "    assert f(v) == v and type(f(v)) is type(v), v\n"
        "assert g() == (1, 2) and g().b == 2",
    ),
    "a class": (
        "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x); return self\n"
        "    def pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)\n"
        "    def __eq__(self, o): return self.items == o.items\n    def __iter__(self): return iter(self.items)\n"
        "    def __getitem__(self, i): return self.items[i]\n    def __add__(self, o):\n"
        "        s = Stack(); s.items = self.items + o.items; return s",
        "s = Stack()\ns.push(1).push(2)\nassert len(s) == 2 and s.pop() == 2 and list(s) == [1] and s[0] == 1\n"
        "assert isinstance(s, Stack) and s == Stack().push(1) and s != Stack() and s\nassert 1 in s and 5 not in s\n"
        "assert list(s + s) == [1, 1]\ns.items = [4]\nassert s.items == [4]",
    ),
    "a linked list": (
        "class Node:\n    def __init__(self, v, n=None): self.v, self.n = v, n\n"
        "def total(node): return 0 if node is None else node.v + total(node.n)",
        "n = Node(1)\nn.n = Node(2, Node(3))\nassert total(n) == 6 and n.n.n.v == 3 and n.n.n.n is None",
    ),
    "takes functions": (
        "def twice(f, x): return f(f(x))\ndef each(items): return [i * 2 for i in items]",
        "assert twice(lambda v: v + 3, 1) == 7\nassert each(i for i in range(3)) == [0, 2, 4]\nassert twice(abs, -1) == 1",
    ),
    "gives generators and functions": (
        "def count(n):\n    for i in range(n): yield i\ndef adder(n): return lambda x: x + n",
        "assert list(count(3)) == [0, 1, 2]\nassert sum(count(4)) == 6\nassert next(count(1)) == 0\nassert adder(2)(3) == 5",
    ),
    "raises": (
        "class Poor(ValueError): pass\ndef f(x):\n    if x == 1: raise KeyError('k')\n    raise Poor('p')",
        "try:\n    f(1)\n    assert False\nexcept KeyError as error:\n    assert 'k' in str(error)\n"
        "try:\n    f(2)\n    assert False\nexcept Poor as error:\n    assert str(error) == 'p'\n"
        "try:\n    f(2)\n    assert False\nexcept ValueError:\n    pass",
    ),
    "imports for the tests": (
        "import math\nfrom typing import List\nfrom collections import Counter\ndef f(x: List[int]): return math.sqrt(x)",
        "assert math.isclose(f(4), 2.0)\nassert Counter('aa') == {'a': 2}",
    ),
    "keeps state": (
        "n = 0\ndef f():\n    global n\n    n += 1\n    return n",
        "f()\nassert f() == 2 and n == 2\nf()\nassert n == 3",
    ),
    "prints and has a main block": (
        "def add(a, b):\n    print('adding')\n    return a + b\nif __name__ == '__main__':\n    print(add(1, 1))",
        "assert add(1, 2) == 3",
    ),
    "keywords": (
        "def f(a, *rest, k=1, **more): return [a, rest, k, more]",
        "assert f(1, 2, k=3, z=4) == [1, (2,), 3, {'z': 4}]",
    ),
    "a context manager": (
        "class C:\n    log = []\n    def __enter__(self): self.log.append('in'); return self\n"
        "    def __exit__(self, *e): self.log.append('out')",
        "with C() as c:\n    assert c.log == ['in']\nassert c.log == ['in', 'out']",
    ),
    "recursion": ("def f(n): return 0 if n == 0 else 1 + f(n - 1)", "assert f(500) == 500"),
}


@pytest.mark.parametrize(("source", "test"), HONEST.values(), ids=HONEST)
def test_honest_programs_pass(source: str, test: str) -> None:
    reward = rewards.grade("code", f"```python\n{source}\n```", test, wall_seconds=30.0)
    assert reward.correct is True, reward.reason


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def add(a, b): return a - b", "AssertionError"),
        ("def add(a, b): return a / 0", "ZeroDivisionError: division by zero"),
        ("def add(a, b) return", "SyntaxError"),
        ("import nowhere", "ModuleNotFoundError: No module named 'nowhere'"),
        ("x = 1", "NameError: name 'add' is not defined"),
        ("while True: pass", "took too long"),
        ("import os; os._exit(0)", "ended early"),
    ],
)
def test_the_reason_says_what_happened(source: str, reason: str) -> None:
    assert reason in rewards.grade("code", f"```python\n{source}\n```", TEST, wall_seconds=3.0).reason


def test_a_program_that_reads_its_input_executes_nothing_else() -> None:
    label = json.dumps({"inputs": ["1"], "outputs": ["1"]})
    source = "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'print(1)'])"
    reward = rewards.grade("code", f"```python\n{source}\n```", label, wall_seconds=20.0)
    assert reward.correct is False
    assert "PermissionError" in reward.reason


@pytest.fixture(scope="module")
def environment_in_tmp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment below the folder that the sandbox builds its root on."""
    folder = tmp_path_factory.mktemp("below")
    if not str(folder.resolve()).startswith("/tmp/"):
        pytest.skip("pytest's temporary folder is not below /tmp")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    return folder / "venv" / "bin" / "python"


def test_a_virtual_environment_below_the_temporary_folder_works(environment_in_tmp: Path) -> None:
    program = (
        "from rewards.sandbox.program import *\n"
        "print(run_python(Program('import sys; print(sys.prefix)'), Limits(wall_seconds=30)).stdout)"
    )
    search = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), *sys.path]))
    found = subprocess.run(
        [environment_in_tmp, "-c", program], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": search}
    )
    assert found.stdout.strip() == str(environment_in_tmp.parents[1]), found.stderr


def test_a_fault_of_the_set_up_is_not_blamed_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    from rewards.sandbox import program as sandbox

    sandbox._missing_permission.cache_clear()
    monkeypatch.setattr(sandbox, "_visible", lambda: ["/usr", "/nowhere-at-all"])  # and so without this Python
    with pytest.raises(Exception) as found:
        rewards.check_grader("code", {})
    monkeypatch.undo()
    sandbox._missing_permission.cache_clear()
    assert "could not be built" in str(found.value)
    assert "best_effort" not in str(found.value)
    assert "permit" not in str(found.value)
    assert run_python(Program("print(1)"), Limits(wall_seconds=20)).stdout == "1\n"
