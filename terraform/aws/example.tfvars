# The cheapest cluster that is still of use. Only package has no default.
cluster = "vcasgd"
region  = "us-east-1"
zones   = ["us-east-1a", "us-east-1b", "us-east-1c"]

# made by: .venv/bin/pip wheel --no-deps --wheel-dir dist .
package = "../../dist/vcasgd-0.1.0-py3-none-any.whl"

# your own address, to reach the API without a tunnel
# api_cidrs = ["203.0.113.7/32"]

control_plane_type = "t3.medium"
store              = { nodes = 1, instance_type = "m6i.large" }
redis              = "self-hosted"

pools = {
  cpu-spot = {
    instance_types     = ["c6i.large", "c5.large", "m6i.large", "m5.large"]
    max_instances      = 8
    max_price_per_hour = 0.06
  }
  gpu-spot = {
    instance_types = ["g4dn.xlarge", "g5.xlarge"]
    max_instances  = 4
    gpus           = 1
    # an image with Ubuntu 24.04 and NVIDIA's driver
    image   = "ami-0123456789abcdef0"
    disk_gb = 60
  }
  # data with this label goes to no other pool
  private = {
    instance_types = ["c6i.large"]
    spot           = false
    max_instances  = 2
    labels         = ["confidential"]
  }
}
