# Plans and applies with a mocked provider for values that only Google knows.

mock_provider "google" {
  mock_data "google_compute_zones" {
    defaults = { names = ["us-central1-f", "us-central1-a", "us-central1-c", "us-central1-b"] }
  }

  mock_resource "google_compute_subnetwork" {
    defaults = {
      id            = "projects/my-project-123/regions/us-central1/subnetworks/made-by-test"
      ip_cidr_range = "10.80.0.0/20"
    }
  }

  mock_resource "google_service_account" {
    defaults = {
      email  = "someone@my-project-123.iam.gserviceaccount.com"
      name   = "projects/my-project-123/serviceAccounts/someone"
      member = "serviceAccount:someone@my-project-123.iam.gserviceaccount.com"
    }
  }

  mock_resource "google_redis_instance" {
    defaults = {
      id   = "projects/my-project-123/locations/us-central1/instances/made-by-test-ledger"
      host = "10.90.0.3"
      port = 6378
    }
  }

  mock_resource "google_compute_region_instance_template" {
    defaults = { name = "made-by-test-gcp-spot-1" }
  }

  mock_resource "google_compute_address" {
    defaults = { address = "203.0.113.20" }
  }
}

# Destroy looks for machines of this cluster; none has this name.
variables {
  cluster = "made-by-test"
  project = "my-project-123"
  package = "vcasgd[gcp]"
}

run "self_hosted" {
  assert {
    condition     = output.api_url == "http://127.0.0.1:8701"
    error_message = "without api_cidrs the API must be reached through a tunnel"
  }

  assert {
    condition     = startswith(output.shell_command, "gcloud compute ssh made-by-test-control ")
    error_message = "shell_command must name the control plane"
  }

  assert {
    condition     = strcontains(output.token_command, "made-by-test-api-token")
    error_message = "token_command must name the secret"
  }

  assert {
    condition     = yamldecode(module.control_data.files["/etc/vcasgd/pools.yaml"]).pools[0].template.instance_template == "regions/us-central1/instanceTemplates/made-by-test-gcp-spot-1"
    error_message = "the controller must receive the created template"
  }

  assert {
    condition     = yamldecode(module.control_data.files["/etc/vcasgd/pools.yaml"]).pools[0].template.secrets.RAY_AUTH_TOKEN == "projects/my-project-123/secrets/made-by-test-ray-token"
    error_message = "machines must fetch Ray's token themselves"
  }

  assert {
    condition     = strcontains(module.control_data.files["/etc/vcasgd/machine.env"], "LEDGER_URL='redis://:PASSWORD@10.80.0.10:6379/0'")
    error_message = "a self-hosted ledger is on the control plane"
  }

  assert {
    condition     = module.store.managed_redis == null && module.store.ledger_disk != null
    error_message = "a self-hosted ledger has a disk, and no managed Redis"
  }
}

run "managed" {
  variables {
    redis = "managed"
  }

  assert {
    condition     = strcontains(module.control_data.files["/etc/vcasgd/machine.env"], "LEDGER_URL='rediss://:PASSWORD@10.90.0.3:6378/0?replicas=1&")
    error_message = "a managed ledger speaks TLS and has a replica"
  }

  assert {
    condition     = contains(keys(module.worker_data["gcp-spot"].files), "/etc/vcasgd/redis-ca.pem")
    error_message = "workers must know the authority of managed Redis"
  }

  assert {
    condition     = strcontains(module.store_data["store-0"].files["/etc/vcasgd/vcasgd.env"], "VCASGD_JOB_USERS=false")
    error_message = "managed Redis can't create users"
  }

  assert {
    condition     = module.store.ledger_disk != null
    error_message = "the authority of the API's certificate must outlive the control plane"
  }
}

run "open_api" {
  variables {
    api_cidrs = ["203.0.113.7/32"]
    store     = { nodes = 2 }
  }

  assert {
    condition     = output.api_url == "https://203.0.113.20"
    error_message = "with api_cidrs the API uses TLS"
  }

  assert {
    condition     = strcontains(module.store_data["store-1"].files["/etc/vcasgd/vcasgd.env"], "VCASGD_NODE=1")
    error_message = "a store node must know its number"
  }

  assert {
    condition     = strcontains(module.store_data["store-1"].files["/etc/vcasgd/machine.env"], "STORE_HOSTS='10.80.0.20 10.80.0.21'")
    error_message = "all machines must know all store nodes, in order"
  }
}

run "tls" {
  variables {
    tls   = true
    store = { nodes = 2 }
  }

  assert {
    condition     = strcontains(module.control_data.files["/etc/vcasgd/machine.env"], "LEDGER_URL='rediss://:PASSWORD@10.80.0.10:6379/0?ssl_ca_certs=/etc/vcasgd/ca.pem'")
    error_message = "the ledger's URL must use TLS and name the authority"
  }

  assert {
    condition = alltrue([
      for host in ["10", "20", "21", "83", "100", "163"] :
      strcontains("${local.subject.TLS_SUBJECT},", "IP:10.80.0.${host},")
    ])
    error_message = "the certificate must have the addresses of all servers that the cluster can get"
  }

  assert {
    condition     = strcontains(module.worker_data["gcp-spot"].files["/etc/vcasgd/machine.env"], "/control/ca.pem'")
    error_message = "workers must fetch the authority"
  }
}

run "replicas" {
  variables {
    store = { nodes = 2, replicas = 1 }
  }

  assert {
    condition = alltrue([
      for files in [module.control_data.files, module.store_data["store-1"].files, module.store_data["replica-1"].files] :
      strcontains(files["/etc/vcasgd/machine.env"], "REPLICA_HOSTS='10.80.0.100 10.80.0.101'") &&
      strcontains(files["/etc/vcasgd/machine.env"], "CONTROL_HOST='10.80.0.10'") &&
      contains(keys(files), "/etc/systemd/system/vcasgd-sentinel.service") &&
      contains(keys(files), "/usr/local/lib/vcasgd/sentinel")
    ])
    error_message = "control plane, store nodes, and replicas must run Sentinels that know all servers"
  }

  assert {
    condition = (
      strcontains(module.store_data["replica-1"].files["/etc/vcasgd/machine.env"], "ADDRESS='10.80.0.101'") &&
      strcontains(module.store_data["replica-1"].files["/etc/vcasgd/machine.env"], "NODE='1'") &&
      contains(keys(module.store_data["replica-1"].files), "/etc/vcasgd/replication.conf") &&
      !contains(keys(module.store_data["replica-1"].files), "/etc/systemd/system/vcasgd-server.service")
    )
    error_message = "a replica must know its store node and have no parameter server"
  }

  assert {
    condition     = toset(keys(module.store_data)) == toset(["store-0", "store-1", "replica-0", "replica-1"])
    error_message = "each replica needs a machine of its own"
  }
}

run "two_replicas" {
  command = plan

  variables {
    store = { replicas = 2 }
  }

  expect_failures = [var.store]
}

run "wrong_names" {
  command = plan

  variables {
    cluster   = "Not A Name"
    project   = "no"
    region    = "nowhere"
    api_cidrs = ["0.0.0.0/0"]
    redis     = "none"
    heartbeat = 0
    store     = { nodes = 0 }
    prices    = "versions.tf"
    package   = "missing.whl"
  }

  expect_failures = [
    var.cluster, var.project, var.region, var.api_cidrs, var.redis, var.heartbeat,
    var.store, var.package, var.prices,
  ]
}

run "zone_in_another_region" {
  command = plan

  variables {
    zones = ["europe-west4-a"]
  }

  expect_failures = [var.zones]
}

run "pool_in_another_region" {
  command = plan

  variables {
    pools = { elsewhere = { machine_types = ["e2-small"], zones = ["europe-west4-a"] } }
  }

  expect_failures = [var.pools]
}

run "region_alone" {
  command = plan

  variables {
    region = "europe-west1"
  }

  assert {
    condition     = length(local.zones) == 3
    error_message = "another region must need no other variable"
  }

  assert {
    condition     = local.pools[0].machine_types == tolist(["e2-standard-2", "n2-standard-2", "n1-standard-2"])
    error_message = "a pool must by default have common types"
  }
}

run "no_price" {
  command = plan

  variables {
    pools = { gpu = { machine_types = ["e2-standard-2", "made-up-8"] } }
  }

  expect_failures = [terraform_data.prices]
}

run "gpus" {
  variables {
    data_buckets = ["my-images"]
    pools = {
      cpu = { machine_types = ["e2-standard-2"] }
      gpu = { machine_types = ["n1-standard-4"], accelerator = { type = "nvidia-tesla-t4", count = 2 } }
      signed = {
        machine_types = ["n1-standard-4"], accelerator = { type = "nvidia-tesla-t4" }, secure_boot = true
      }
    }
  }

  assert {
    condition     = local.gpus == { cpu = 0, gpu = 2, signed = 1 }
    error_message = "a pool's GPUs are its accelerators"
  }

  assert {
    condition     = { for name, template in module.worker_template : name => template.secure_boot } == { cpu = true, gpu = false, signed = true }
    error_message = "machines with GPUs have secure boot only on request, because their driver is rarely signed"
  }

  assert {
    condition     = strcontains(module.worker_data["cpu"].files["/etc/vcasgd/machine.env"], "whl/cpu") && !strcontains(module.worker_data["gpu"].files["/etc/vcasgd/machine.env"], "whl/cpu")
    error_message = "only machines with GPUs need CUDA"
  }
}

run "private" {
  variables {
    private = true
  }
}

run "private_and_open" {
  command = plan

  variables {
    private   = true
    api_cidrs = ["203.0.113.7/32"]
  }

  expect_failures = [var.private]
}

run "backups" {
  variables {
    ledger_backup = { days = 7, restore = "made-by-test-snapshot" }
  }

  assert {
    condition     = module.store.backup_days == 7
    error_message = "the ledger's disk must have a policy for snapshots"
  }
}

run "invalid_backups" {
  command = plan

  variables {
    ledger_backup = { days = -1 }
  }

  expect_failures = [var.ledger_backup]
}

run "gateway" {
  variables {
    gateway = { cidrs = ["0.0.0.0/0"], trust = "volunteer" }
  }

  assert {
    condition     = output.join_url == "https://203.0.113.20:8790" && strcontains(output.join_token_command, " --pool volunteers ")
    error_message = "outputs must have what volunteers and their administrator need"
  }

  assert {
    condition = (
      strcontains(module.control_data.files["/etc/vcasgd/vcasgd.env"], "VCASGD_JOIN_URL=https://203.0.113.20:8790\n") &&
      strcontains(module.control_data.files["/etc/vcasgd/vcasgd.env"], "VCASGD_JOIN_PORT=8790\n") &&
      strcontains(module.control_data.files["/etc/vcasgd/machine.env"], "JOIN='pinned'") &&
      contains(keys(module.control_data.files), "/etc/systemd/system/vcasgd-gateway.service")
    )
    error_message = "the control plane must run a gateway with a certificate of its own"
  }

  assert {
    condition     = [for pool in yamldecode(module.control_data.files["/etc/vcasgd/pools.yaml"]).pools : pool.provider] == ["gcp", "join"]
    error_message = "there must be a pool for machines that join"
  }

  assert {
    condition     = output.api_url == "http://127.0.0.1:8701"
    error_message = "a gateway must not open the API's own port"
  }
}

run "gateway_with_a_certificate" {
  command = plan

  variables {
    gateway = {
      cidrs       = ["203.0.113.0/24"]
      port        = 8443
      host        = "join.example.org"
      certificate = "/etc/letsencrypt/live/join.example.org/fullchain.pem"
      key         = "/etc/letsencrypt/live/join.example.org/privkey.pem"
    }
  }

  assert {
    condition     = local.join == { kind = "known", url = "https://join.example.org:8443" }
    error_message = "a certificate of a known authority needs no fingerprint"
  }

  assert {
    condition     = local.join_settings.VCASGD_JOIN_CERTIFICATE == "/etc/letsencrypt/live/join.example.org/fullchain.pem"
    error_message = "the gateway must use the certificate"
  }
}

run "gateway_with_acme" {
  command = plan

  variables {
    gateway = {
      cidrs = ["203.0.113.0/24"]
      host  = "join.example.org"
      acme  = { email = "ada@example.org" }
    }
  }

  assert {
    condition     = local.join == { kind = "acme", url = "https://join.example.org:8790" }
    error_message = "a certificate of a known authority needs no fingerprint"
  }

  assert {
    condition     = local.join_settings.VCASGD_JOIN_CERTIFICATE == "/var/lib/vcasgd/ledger/acme/certificate.pem"
    error_message = "the gateway must use the certificate that the script installs"
  }
}

run "gateway_with_acme_for_no_name" {
  command = plan

  variables {
    gateway = { cidrs = ["203.0.113.0/24"], acme = { email = "ada@example.org" } }
  }

  expect_failures = [var.gateway]
}

run "no_gateway" {
  command = plan

  assert {
    condition     = output.join_url == null && output.join_token_command == null && length(local.join_pools) == 0
    error_message = "without the variable, nothing must be open"
  }
}

run "gateway_without_networks" {
  command = plan

  variables {
    gateway = { cidrs = [] }
  }

  expect_failures = [var.gateway]
}

run "gateway_at_the_ledgers_port" {
  command = plan

  variables {
    gateway = { cidrs = ["0.0.0.0/0"], port = 6379 }
  }

  expect_failures = [var.gateway]
}

run "gateway_with_half_a_certificate" {
  command = plan

  variables {
    gateway = { cidrs = ["0.0.0.0/0"], certificate = "/etc/gateway.pem" }
  }

  expect_failures = [var.gateway]
}

run "gateway_with_a_managed_ledger" {
  command = plan

  variables {
    redis   = "managed"
    gateway = { cidrs = ["0.0.0.0/0"] }
  }

  expect_failures = [var.gateway]
}

run "another_first_zone" {
  command = plan

  variables {
    zones = ["us-central1-b", "us-central1-a"]
  }

  expect_failures = [terraform_data.zone]
}

run "cluster_with_two_dashes" {
  command = plan

  variables {
    cluster = "made--by-test"
  }

  expect_failures = [var.cluster]
}
