"""The panels as a layout of TensorBoard's tab `Custom scalars`."""

from rlpipe.dashboard.panels import GROUPS, name_pattern

Layout = dict[str, dict[str, tuple[str, list[str]]]]


def custom_scalars() -> Layout:
    """What `SummaryWriter.add_custom_scalars` takes. TensorBoard cannot stack, so stacked panels are lines there."""
    return {
        group.title: {
            panel.title: ("Multiline", [name_pattern(metric) for metric in panel.metrics]) for panel in group.panels
        }
        for group in GROUPS
    }
