.PHONY: setup test test-all chaos demo
setup:
	bash scripts/setup.sh dev
test:
	bash scripts/test.sh
test-all:
	bash scripts/test.sh --slow
chaos:
	bash scripts/chaos.sh
demo:
	bash scripts/demo.sh
