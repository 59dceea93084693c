.PHONY: setup test test-all demo
setup:
	bash scripts/setup.sh dev
test:
	bash scripts/test.sh
test-all:
	bash scripts/test.sh --slow
demo:
	bash scripts/demo.sh
