"""Variants of methods that the tables of one paper need, a module for each paper.

The name of a variant is PAPER.VARIANT, such as criterion=camera.paper. `moe_lab.errors.Registry`
imports the module PAPER when such a name is looked up.
"""
