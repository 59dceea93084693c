.PHONY: setup test test-all chaos planted demo
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
demo:
	bash scripts/demo.sh
