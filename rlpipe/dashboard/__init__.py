"""Dashboards as code: one list of panels, from which those of Weights & Biases and TensorBoard are made."""

from rlpipe.dashboard.panels import GROUPS, Group, Panel

__all__ = ["GROUPS", "Group", "Panel"]
