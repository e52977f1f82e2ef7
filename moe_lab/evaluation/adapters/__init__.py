"""Modules that import lm-eval, EvalPlus or EvalScope, or follow the rules of BFCL. Harnesses use
these modules to ask and to grade."""
