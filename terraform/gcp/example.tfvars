# The cheapest useful cluster. Only project and package have no default.
project = "my-project-123"
cluster = "vcasgd"
region  = "us-central1"

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

control_plane_type = "e2-medium"
store              = { nodes = 1, machine_type = "e2-standard-2" } # replicas = 1 survives the failure of its machine
redis              = "self-hosted"

pools = {
  cpu-spot = {
    # machine_types = ["e2-standard-4", "n2-standard-4"] instead of common ones with 2 vCPUs
    max_machines = 8
  }
  # N1 machines with a GPU; give their price in a file (prices). G2 types need no accelerator.
  # gpu-spot = {
  #   machine_types = ["n1-standard-4"], accelerator = { type = "nvidia-tesla-t4" }, image = "…"
  # }
  # Data with this label goes to no other pool.
  private = {
    spot         = false
    max_machines = 2
    labels       = ["confidential"]
  }
}
