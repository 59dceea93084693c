.PHONY: setup test test-all chaos planted gates parity demo
setup:
	bash scripts/setup.sh dev
test:
	bash scripts/test.sh
test-all:
	bash scripts/test.sh --slow
chaos:
	bash scripts/chaos.sh
planted:
	bash scripts/test.sh --slow tests/planted
gates:
	bash scripts/benchmark.sh learning_gates
parity:
	bash scripts/benchmark.sh parity
demo:
	bash scripts/demo.sh
