# Inputs that are rejected before anything is created.

mock_provider "aws" {
  mock_data "aws_availability_zones" {
    defaults = { names = ["us-east-1a", "us-east-1b", "us-east-1c", "us-east-1d"] }
  }

  mock_data "aws_iam_policy_document" {
    defaults = { json = "{}" }
  }

  mock_data "aws_ami" {
    defaults = { id = "ami-0c0ffee" }
  }

  mock_resource "aws_iam_role" {
    defaults = { arn = "arn:aws:iam::123456789012:role/made-by-test" }
  }

  mock_resource "aws_eip" {
    defaults = { public_ip = "203.0.113.9" }
  }

  mock_resource "aws_subnet" {
    defaults = { cidr_block = "10.80.0.0/20" }
  }

  mock_resource "aws_elasticache_replication_group" {
    defaults = { primary_endpoint_address = "master.vcasgd.cache.amazonaws.com" }
  }
}

# Destroy looks for machines of this cluster; none has this name.
variables {
  cluster = "made-by-test"
  package = "vcasgd[aws]"
}

# Before all that is applied, because a cluster stays in its region.
run "zones_of_another_region" {
  command = plan

  variables {
    region = "us-west-2"
    zones  = ["us-east-1a"]
  }

  expect_failures = [var.zones]
}

run "region_alone" {
  command = plan

  variables {
    region = "us-east-2"
  }

  assert {
    condition     = local.pools[0].machine_types == tolist(["c6i.large", "m6i.large", "m5.large"])
    error_message = "in another region, a pool must by default have the types that have a price there"
  }
}

run "region_without_prices" {
  command = plan

  variables {
    region = "sa-east-1"
  }

  expect_failures = [terraform_data.prices]
}

run "managed" {
  variables {
    redis = "managed"
    store = { nodes = 2 }
  }

  assert {
    condition     = strcontains(module.control_data.files["/etc/vcasgd/machine.env"], "LEDGER_URL='rediss://:PASSWORD@master.vcasgd.cache.amazonaws.com:6379/0?replicas=1&")
    error_message = "a managed ledger speaks TLS and has a replica"
  }

  assert {
    condition     = strcontains(module.store_data["store-1"].files["/etc/vcasgd/vcasgd.env"], "VCASGD_JOB_USERS=false")
    error_message = "managed Redis can't create users"
  }

  assert {
    condition     = module.store.ledger_disk != null && length(module.store.node_ids) == 2
    error_message = "the authority of the API's certificate must outlive the control plane"
  }

  assert {
    condition     = yamldecode(module.control_data.files["/etc/vcasgd/pools.yaml"]).pools[0].zones == ["us-east-1a", "us-east-1b", "us-east-1c"]
    error_message = "without zones a pool is in the first three of the region"
  }

  assert {
    condition     = data.aws_availability_zones.here.state == null
    error_message = "a zone that fails must not move the ledger's disk to another one"
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
    condition     = strcontains(module.worker_data["aws-spot"].files["/etc/vcasgd/machine.env"], "/control/ca.pem'")
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
    condition     = toset(keys(module.store.node_ids)) == toset(["store-0", "store-1", "replica-0", "replica-1"])
    error_message = "each replica needs a machine of its own"
  }
}

run "region_of_a_cluster" {
  command = plan

  variables {
    region = "us-west-2"
    zones  = ["us-west-2a"]
  }

  expect_failures = [terraform_data.zones]
}

run "another_order_of_zones" {
  command = plan

  variables {
    zones = ["us-east-1a", "us-east-1c", "us-east-1b"]
  }

  expect_failures = [terraform_data.zones]
}

run "more_zones" {
  command = plan

  variables {
    zones = ["us-east-1a", "us-east-1b", "us-east-1c", "us-east-1d"]
  }
}

run "long_user_data" {
  command = plan

  variables {
    pools = { aws-spot = { labels = [for number in range(600) : sha256(number)] } }
  }

  expect_failures = [terraform_data.prices]
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
    region    = "nowhere"
    api_cidrs = ["0.0.0.0/0"]
    redis     = "none"
    heartbeat = 0
    store     = { nodes = 65 }
    prices    = "versions.tf"
    package   = "missing.whl"
  }

  expect_failures = [
    var.cluster, var.region, var.api_cidrs, var.redis, var.heartbeat, var.store, var.package, var.prices,
  ]
}

run "no_pool" {
  command = plan

  variables {
    pools = {}
  }

  expect_failures = [var.pools]
}

run "pool_in_another_zone" {
  command = plan

  variables {
    zones = ["us-east-1a"]
    pools = { elsewhere = { machine_types = ["c5.large"], zones = ["us-east-1b"] } }
  }

  expect_failures = [var.pools]
}

run "no_price" {
  command = plan

  variables {
    pools = { gpu = { machine_types = ["c5.large", "made-up.8xlarge"] } }
  }

  expect_failures = [terraform_data.prices]
}

run "own_price_gpus_and_data" {
  variables {
    prices       = "tests/prices.yaml"
    data_buckets = ["my-images"]
    pools = {
      cpu = { machine_types = ["c5.large"] }
      gpu = { machine_types = ["made-up.8xlarge"] }
    }
  }

  assert {
    condition     = local.gpus == { cpu = 0, gpu = 8 }
    error_message = "a pool's GPUs are those of its types"
  }

  assert {
    condition     = strcontains(module.worker_data["cpu"].files["/etc/vcasgd/machine.env"], "whl/cpu") && !strcontains(module.worker_data["gpu"].files["/etc/vcasgd/machine.env"], "whl/cpu")
    error_message = "only machines with GPUs need CUDA"
  }

  assert {
    condition     = strcontains(output.tunnel_command, "portNumber=8700,localPortNumber=8701")
    error_message = "the tunnel must not need the port of a local stack"
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
    ledger_backup = { days = 7, restore = "snap-0123456789abcdef0" }
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
    condition     = output.join_url == "https://203.0.113.9:8790" && strcontains(output.join_token_command, " --pool volunteers ")
    error_message = "outputs must have what volunteers and their administrator need"
  }

  assert {
    condition = (
      strcontains(module.control_data.files["/etc/vcasgd/vcasgd.env"], "VCASGD_JOIN_URL=https://203.0.113.9:8790\n") &&
      strcontains(module.control_data.files["/etc/vcasgd/vcasgd.env"], "VCASGD_JOIN_PORT=8790\n") &&
      strcontains(module.control_data.files["/etc/vcasgd/machine.env"], "JOIN='pinned'") &&
      contains(keys(module.control_data.files), "/etc/systemd/system/vcasgd-gateway.service")
    )
    error_message = "the control plane must run a gateway with a certificate of its own"
  }

  assert {
    condition     = [for pool in yamldecode(module.control_data.files["/etc/vcasgd/pools.yaml"]).pools : pool.provider] == ["aws", "join"]
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

run "cluster_with_a_reserved_prefix" {
  command = plan

  variables {
    cluster = "sg-mine"
  }

  expect_failures = [var.cluster]
}
