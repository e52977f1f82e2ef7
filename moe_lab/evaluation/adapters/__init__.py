"""What imports lm-eval, EvalPlus or EvalScope, or follows the rules of BFCL. Harnesses use it to
ask and to grade."""
