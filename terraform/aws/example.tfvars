# The cheapest useful cluster. Only package has no default.
cluster = "vcasgd"
region  = "us-east-1"

# With the dashboard. Built by: .venv/bin/pip wheel --no-deps --wheel-dir dist .
package = "../../dist/vcasgd-0.2.0-py3-none-any.whl"

# Packages that the jobs import; the digits example needs scikit-learn.
python_packages = ["scikit-learn"]

# Buckets with training data.
# data_buckets = ["my-images"]

# Your own address, to reach the API without a tunnel.
# api_cidrs = ["203.0.113.7/32"]

# A port where machines elsewhere join:
# gateway = { cidrs = ["0.0.0.0/0"], trust = "volunteer" }

control_plane_type = "t3.medium"
store              = { nodes = 1, instance_type = "m6i.large" } # replicas = 1 survives the failure of its machine
redis              = "self-hosted"

pools = {
  cpu-spot = {
    # machine_types   = ["c6i.xlarge", "m6i.xlarge"] instead of common ones with 2 vCPUs
    max_machines       = 8
    max_price_per_hour = 0.06
  }
  # With the ID of an image that infra/packer made with gpu=true:
  # gpu-spot = { machine_types = ["g4dn.xlarge"], image = "ami-…" }
  # Data with this label goes to no other pool.
  private = {
    spot         = false
    max_machines = 2
    labels       = ["confidential"]
  }
}
