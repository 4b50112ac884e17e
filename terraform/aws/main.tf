data "aws_caller_identity" "me" {}

# Also those that fail at the moment: without one, the ledger's disk would move to another zone, empty.
data "aws_availability_zones" "here" {
  filter {
    name   = "opt-in-status"
    values = ["opt-in-not-required"]
  }
}

data "aws_ami" "ubuntu" {
  count = var.image == null ? 1 : 0

  owners      = ["099720109477"] # Canonical
  most_recent = true

  filter {
    name   = "name"
    values = ["ubuntu/images/hvm-ssd-gp3/ubuntu-noble-24.04-amd64-server-*"]
  }
}

locals {
  zones       = length(var.zones) > 0 ? var.zones : slice(sort(data.aws_availability_zones.here.names), 0, min(3, length(data.aws_availability_zones.here.names)))
  image       = var.image != null ? var.image : data.aws_ami.ubuntu[0].id
  managed     = var.redis == "managed"
  open        = length(var.api_cidrs) > 0
  public      = local.open || var.gateway != null
  node_names  = [for index in range(var.store.nodes) : "store-${index}"]
  replicas    = var.store.replicas > 0 ? [for index in range(var.store.nodes) : "replica-${index}"] : []
  bucket_name = "${var.cluster}-${data.aws_caller_identity.me.account_id}-${var.region}"

  # Fixed, so that configuration can name an address before its machine exists.
  control_address = cidrhost(module.network.home_cidr, 10)
  store_addresses = merge(
    { for index, name in local.node_names : name => cidrhost(module.network.home_cidr, 20 + index) },
    { for index, name in local.replicas : name => cidrhost(module.network.home_cidr, 100 + index) },
  )
  # All that a later change of store can add, because there is one certificate for the life of the cluster.
  server_addresses = [for host in concat([10], range(20, 84), range(100, 164)) : cidrhost(module.network.home_cidr, host)]
  head_port        = 10000

  is_wheel = endswith(var.package, ".whl")
  releases = local.is_wheel ? {
    (basename(var.package))   = var.package
    "constraints-runtime.txt" = "${path.module}/../../constraints-runtime.txt"
  } : {}

  price_table = jsondecode(file("${path.module}/../../vcasgd/fleet/data/prices-aws.json"))
  own_prices  = try(yamldecode(file(var.prices)).aws, {})
  types       = merge(local.price_table.types, try(local.own_prices.types, {}))
  priced = setintersection(keys(local.types), setunion(
    keys(try(local.price_table.on_demand[var.region], {})),
    keys(try(local.own_prices.on_demand[var.region], {})),
  ))

  # Pools without types use common ones that have a price in the region.
  common_types  = ["c6i.large", "c5.large", "m6i.large", "m5.large"]
  known_types   = [for type in local.common_types : type if contains(local.priced, type)]
  default_types = length(local.known_types) > 0 ? local.known_types : local.common_types
  machine_types = { for name, pool in var.pools : name => pool.machine_types != null ? pool.machine_types : local.default_types }
  unpriced      = sort(setsubtract(flatten(values(local.machine_types)), local.priced))

  # GPUs of each pool's machines, and pip options that leave CUDA to those that have some.
  gpus        = { for name, pool in var.pools : name => coalesce(pool.gpus, try(max([for type in local.machine_types[name] : try(local.types[type].gpus, 0)]...), 0)) }
  cpu_options = coalesce(var.pip_options, "--extra-index-url https://download.pytorch.org/whl/cpu")
  pip_options = {
    for name, pool in var.pools : name => coalesce(
      pool.pip_options, var.pip_options, local.gpus[name] > 0 ? " " : local.cpu_options,
    )
  }

  ledger_url = (local.managed
    ? "rediss://:PASSWORD@${module.store.managed_redis.address}:6379/0?replicas=1&ssl_ca_certs=/etc/ssl/certs/ca-certificates.crt"
    : var.tls ? "rediss://:PASSWORD@${local.control_address}:6379/0?ssl_ca_certs=/etc/vcasgd/ca.pem"
    : "redis://:PASSWORD@${local.control_address}:6379/0"
  )

  # Variables for the scripts on every machine; the scripts add the passwords.
  machine = {
    AWS_DEFAULT_REGION = var.region
    CLUSTER            = var.cluster
    CONSTRAINTS        = local.is_wheel ? module.bucket.releases["constraints-runtime.txt"] : ""
    PACKAGE            = local.is_wheel ? module.bucket.releases[basename(var.package)] : var.package
    PIP_OPTIONS        = local.cpu_options
  }
  # The control plane issues one certificate for all servers, and puts its authority into the bucket.
  encryption = var.tls ? { AUTHORITY = "${module.bucket.url}/control/ca.pem" } : {}
  subject    = var.tls ? { TLS_SUBJECT = join(",", [for address in local.server_addresses : "IP:${address}"]) } : {}
  inside = merge(local.encryption, local.subject, {
    CONTROL_HOST  = local.control_address
    LEDGER_URL    = local.ledger_url
    MANAGED_REDIS = local.managed ? module.store.managed_redis.id : ""
    REPLICA_HOSTS = join(" ", [for name in local.replicas : local.store_addresses[name]])
    STORE_HOSTS   = join(" ", [for name in local.node_names : local.store_addresses[name]])
  })
  settings = {
    AWS_REGION         = var.region
    VCASGD_CLUSTER     = var.cluster
    VCASGD_HEARTBEAT   = var.heartbeat
    VCASGD_HOME        = "/var/lib/vcasgd"
    VCASGD_JOB_USERS   = !local.managed
    VCASGD_RAY_ADDRESS = "${local.control_address}:${local.head_port}"
    VCASGD_STORAGE_URL = module.bucket.url
    VCASGD_STORE_ZONE  = local.zones[0]
  }

  public_address = local.public ? aws_eip.api[0].public_ip : null

  # Machines elsewhere reach the gateway by the control plane's public address.
  join = var.gateway == null ? null : {
    kind = var.gateway.acme != null ? "acme" : var.gateway.certificate == null ? "pinned" : "known"
    url  = "https://${coalesce(var.gateway.host, local.public_address)}:${var.gateway.port}"
  }
  join_folder = "/var/lib/vcasgd/ledger/${try(local.join.kind, "") == "acme" ? "acme" : "gateway"}"
  join_settings = var.gateway == null ? {} : {
    VCASGD_API_SOCKET       = "/run/vcasgd-api/api.sock"
    VCASGD_JOIN_PORT        = tostring(var.gateway.port)
    VCASGD_JOIN_URL         = local.join.url
    VCASGD_JOIN_CERTIFICATE = coalesce(var.gateway.certificate, "${local.join_folder}/certificate.pem")
    VCASGD_JOIN_KEY         = coalesce(var.gateway.key, "${local.join_folder}/key.pem")
  }
  join_pools = var.gateway == null ? [] : [
    { name = var.gateway.pool, provider = "join", trust = var.gateway.trust }
  ]

  pools = concat([
    for name, pool in var.pools : {
      name               = name
      provider           = "aws"
      region             = var.region
      zones              = coalesce(pool.zones, local.zones)
      machine_types      = local.machine_types[name]
      spot               = pool.spot
      max_machines       = pool.max_machines
      labels             = pool.labels
      boot_seconds       = pool.boot_seconds
      max_price_per_hour = pool.max_price_per_hour
      cpus               = pool.cpus
      gpus               = local.gpus[name]
      template = {
        launch_template = module.worker_template[name].id
        subnets         = { for zone in coalesce(pool.zones, local.zones) : zone => module.network.subnets[zone] }
        secrets         = { RAY_AUTH_TOKEN = module.identity.secrets["ray-token"] }
      }
    }
  ], local.join_pools)
}

# A machine without a price would count against no budget, so the controller refuses such a pool.
resource "terraform_data" "prices" {
  input = local.price_table.as_of

  lifecycle {
    precondition {
      condition     = length(local.unpriced) == 0
      error_message = "pools: no price for ${join(", ", local.unpriced)} in ${var.region} in the tables of ${local.price_table.as_of}; name a file with their prices in the variable prices (docs/pools.md, Prices)."
    }

    # 16 KiB in Base64.
    precondition {
      condition     = length(base64gzip(module.control_data.user_data)) <= 21848
      error_message = "pools, prices: with them, the user data of the control plane has more than the 16 KiB that AWS takes; shorten them."
    }
  }
}

# In another region, all that exists would look deleted: an apply would make it again there, and forget machines that
# are still billed. The first zone has the ledger's disk, and subnets follow the order.
resource "terraform_data" "zones" {
  input = local.zones

  lifecycle {
    ignore_changes = [input]

    postcondition {
      condition     = alltrue([for index, zone in self.output : try(local.zones[index], zone) == zone])
      error_message = "zones: this cluster is in ${join(", ", self.output)}, in this order; add others behind them. To move it, destroy it first, or make another one in a workspace of its own, with another name in cluster."
    }
  }
}

module "network" {
  source = "../modules/aws/network"

  cluster    = var.cluster
  cidr       = var.network_cidr
  zones      = local.zones
  api_cidrs  = var.api_cidrs
  gateway    = var.gateway == null ? null : { cidrs = var.gateway.cidrs, port = var.gateway.port, acme = var.gateway.acme != null }
  private    = var.private
  replicated = var.store.replicas > 0
}

module "bucket" {
  source = "../modules/aws/bucket"

  name = local.bucket_name
  keep = var.keep_bucket

  encrypted_only = var.endpoint_url == null || startswith(coalesce(var.endpoint_url, "https"), "https")

  releases = local.releases
}

module "identity" {
  source = "../modules/aws/identity"

  cluster    = var.cluster
  bucket_arn = module.bucket.arn

  data_buckets = var.data_buckets
}

module "store_data" {
  source   = "../modules/cloud-init"
  for_each = { for name in concat(local.node_names, local.replicas) : name => split("-", name) }

  role  = each.value[0]
  cloud = "aws"
  machine = merge(local.machine, local.inside, {
    ADDRESS = local.store_addresses[each.key]
    NODE    = each.value[1]
  })
  settings = merge(local.settings, {
    VCASGD_NODE = each.value[1]
  })
}

module "store" {
  source = "../modules/aws/store"

  cluster           = var.cluster
  redis             = var.redis
  zone              = local.zones[0]
  subnet_ids        = [for zone in local.zones : module.network.subnets[zone]]
  security_groups   = { store = module.network.security_groups["store"], managed = module.network.security_groups["managed"] }
  disk              = var.ledger_disk
  backup            = var.ledger_backup
  managed_node_type = var.managed_redis_type

  nodes = {
    instance_type = var.store.instance_type
    image         = local.image
    profile       = module.identity.profiles["store"]
    machines = {
      for name, data in module.store_data : name => {
        address = local.store_addresses[name], user_data = data.user_data
      }
    }
  }
}

module "worker_data" {
  source   = "../modules/cloud-init"
  for_each = var.pools

  role  = "worker"
  cloud = "aws"
  machine = merge(local.machine, local.encryption, {
    PIP_OPTIONS  = local.pip_options[each.key]
    PIP_PACKAGES = join(" ", var.python_packages)
  })
  settings = { AWS_REGION = var.region, VCASGD_METADATA_URL = "http://169.254.169.254", VCASGD_METADATA_KIND = "aws" }
}

module "worker_template" {
  source   = "../modules/aws/worker-template"
  for_each = var.pools

  cluster   = var.cluster
  pool      = each.key
  image     = coalesce(each.value.image, local.image)
  disk_gb   = coalesce(each.value.disk_gb, local.gpus[each.key] > 0 ? 100 : 30)
  place     = { security_group_id = module.network.security_groups["worker"], profile = module.identity.profiles["worker"] }
  user_data = module.worker_data[each.key].user_data
}

resource "aws_eip" "api" {
  count = local.public ? 1 : 0

  domain = "vpc"

  tags = { Name = "${var.cluster}-api" }
}

module "control_data" {
  source = "../modules/cloud-init"

  role  = "control-plane"
  cloud = "aws"
  machine = merge(local.machine, local.inside, {
    ADDRESS            = local.control_address
    JOIN               = try(local.join.kind, "")
    ACME_NAME          = try(var.gateway.acme == null ? "" : var.gateway.host, "")
    ACME_EMAIL         = try(var.gateway.acme.email, "")
    ACME_SERVER        = try(coalesce(var.gateway.acme.server, ""), "")
    API_SUBJECT        = "IP:${local.open ? aws_eip.api[0].public_ip : "127.0.0.1"},DNS:localhost"
    LEDGER_DISK        = module.store.ledger_disk
    VCASGD_STORAGE_URL = module.bucket.url
  })
  settings = merge(
    local.settings,
    {
      VCASGD_API_URL        = "http://127.0.0.1:8700"
      VCASGD_LOCAL_CAPACITY = 0
      VCASGD_POOLS          = "/etc/vcasgd/pools.yaml"
    },
    local.join_settings,
    var.prices == null ? {} : { VCASGD_PRICES = "/etc/vcasgd/prices.yaml" },
  )
  files = merge(
    { "pools.yaml" = yamlencode({ pools = local.pools }) },
    var.prices == null ? {} : { "prices.yaml" = file(var.prices) },
  )
}

# The machines that the controller launches are not in Terraform's state. They are terminated by
# tag, after the control plane, which could launch new ones, and before their network.
resource "terraform_data" "fleet" {
  input = {
    script   = "${path.module}/../../infra/fleet/terminate-aws"
    cluster  = var.cluster
    region   = var.region
    endpoint = var.endpoint_url == null ? "" : var.endpoint_url
  }

  provisioner "local-exec" {
    when    = destroy
    command = "if [ -n \"$ENDPOINT\" ]; then export AWS_ENDPOINT_URL=\"$ENDPOINT\"; fi; exec \"$SCRIPT\" \"$CLUSTER\" \"$REGION\""

    environment = {
      SCRIPT   = self.input.script
      CLUSTER  = self.input.cluster
      REGION   = self.input.region
      ENDPOINT = self.input.endpoint
    }
  }

  depends_on = [module.network, module.identity, module.worker_template]
}

module "control_plane" {
  source = "../modules/aws/control-plane"

  cluster       = var.cluster
  image         = local.image
  instance_type = var.control_plane_type
  user_data     = module.control_data.user_data

  place = {
    subnet_id         = module.network.subnets[local.zones[0]]
    private_address   = local.control_address
    security_group_id = module.network.security_groups["control"]
    profile           = module.identity.profiles["control"]
    role              = module.identity.roles["control"].name
  }

  fleet = {
    launch_template_ids = [for template in module.worker_template : template.id]
    subnet_ids          = values(module.network.subnets)
    security_group_id   = module.network.security_groups["worker"]
    role_arn            = module.identity.roles["worker"].arn
  }

  ledger_disk    = module.store.ledger_disk
  public_address = { id = one(aws_eip.api[*].id), attached = local.public }

  depends_on = [terraform_data.fleet]
}
