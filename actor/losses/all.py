"""Imports every module that registers losses."""

import actor.losses.policy
import actor.losses.policy_family
import actor.losses.supervised  # noqa: F401
