# The cheapest useful cluster. Only project and package have no default.
project = "my-project-123"
cluster = "vcasgd"
region  = "us-central1"
zones   = ["us-central1-a", "us-central1-b", "us-central1-c"]

# Built by: .venv/bin/pip wheel --no-deps --wheel-dir dist .
package = "../../dist/vcasgd-0.1.0-py3-none-any.whl"

# Packages that the jobs import; the digits example needs scikit-learn.
python_packages = ["scikit-learn"]

# Your own address, to reach the API without a tunnel.
# api_cidrs = ["203.0.113.7/32"]

control_plane_type = "e2-medium"
store              = { nodes = 1, machine_type = "e2-standard-2" }
redis              = "self-hosted"

pools = {
  cpu-spot = {
    instance_types = ["e2-standard-2", "n2-standard-2", "n1-standard-2"]
    max_instances  = 8
  }
  # Data with this label goes to no other pool.
  private = {
    instance_types = ["e2-standard-2"]
    spot           = false
    max_instances  = 2
    labels         = ["confidential"]
  }
}
