# Everything has a default. With another folder and port several stacks run side by side:
home = "/tmp/vcasgd-try"
port = 8701
