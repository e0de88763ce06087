"""What `histograph bench` measures: the tool against the literal algorithm and the alternatives."""
