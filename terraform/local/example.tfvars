# Everything has a default. With other folders and ports, several stacks run side by side:
home = "/tmp/vcasgd-try"
port = 8701
