# Also those that fail at the moment: without one, the ledger's disk would move to another zone, empty.
data "google_compute_zones" "here" {
  count = length(var.zones) == 0 ? 1 : 0

  region = var.region
}

locals {
  zones       = length(var.zones) > 0 ? var.zones : slice(sort(data.google_compute_zones.here[0].names), 0, min(3, length(data.google_compute_zones.here[0].names)))
  managed     = var.redis == "managed"
  open        = length(var.api_cidrs) > 0
  public      = local.open || var.gateway != null
  node_names  = [for index in range(var.store.nodes) : "store-${index}"]
  replicas    = var.store.replicas > 0 ? [for index in range(var.store.nodes) : "replica-${index}"] : []
  bucket_name = "${var.cluster}-${var.project}"

  # Fixed, so that configuration can name an address before its machine exists.
  control_address = cidrhost(module.network.cidr, 10)
  store_addresses = merge(
    { for index, name in local.node_names : name => cidrhost(module.network.cidr, 20 + index) },
    { for index, name in local.replicas : name => cidrhost(module.network.cidr, 100 + index) },
  )
  # All that a later change of store can add, because there is one certificate for the life of the cluster.
  server_addresses = [for host in concat([10], range(20, 84), range(100, 164)) : cidrhost(module.network.cidr, host)]
  head_port        = 10000

  is_wheel = endswith(var.package, ".whl")
  releases = local.is_wheel ? {
    (basename(var.package))   = var.package
    "constraints-runtime.txt" = "${path.module}/../../constraints-runtime.txt"
  } : {}

  price_table = jsondecode(file("${path.module}/../../vcasgd/fleet/data/prices-gcp.json"))
  own_prices  = try(yamldecode(file(var.prices)).gcp, {})
  types       = merge(local.price_table.types, try(local.own_prices.types, {}))
  priced = setintersection(keys(local.types), setunion(
    keys(try(local.price_table.on_demand[var.region], {})),
    keys(try(local.own_prices.on_demand[var.region], {})),
  ))

  # Pools without types use common ones that have a price in the region.
  common_types  = ["e2-standard-2", "n2-standard-2", "n1-standard-2"]
  known_types   = [for type in local.common_types : type if contains(local.priced, type)]
  default_types = length(local.known_types) > 0 ? local.known_types : local.common_types
  machine_types = { for name, pool in var.pools : name => pool.machine_types != null ? pool.machine_types : local.default_types }
  unpriced      = sort(setsubtract(flatten(values(local.machine_types)), local.priced))

  # GPUs of each pool's machines, and pip options that leave CUDA to those that have some.
  gpus        = { for name, pool in var.pools : name => coalesce(pool.gpus, try(pool.accelerator.count, null), try(max([for type in local.machine_types[name] : try(local.types[type].gpus, 0)]...), 0)) }
  cpu_options = coalesce(var.pip_options, "--extra-index-url https://download.pytorch.org/whl/cpu")
  pip_options = {
    for name, pool in var.pools : name => coalesce(
      pool.pip_options, var.pip_options, local.gpus[name] > 0 ? " " : local.cpu_options,
    )
  }

  # The certificate authority belongs to the server, so trusting it is stricter than comparing names.
  ledger_url = (local.managed
    ? "rediss://:PASSWORD@${module.store.managed_redis.address}:${module.store.managed_redis.port}/0?replicas=1&ssl_ca_certs=/etc/vcasgd/redis-ca.pem&ssl_check_hostname=false"
    : var.tls ? "rediss://:PASSWORD@${local.control_address}:6379/0?ssl_ca_certs=/etc/vcasgd/ca.pem"
    : "redis://:PASSWORD@${local.control_address}:6379/0"
  )
  authority = local.managed ? { "redis-ca.pem" = module.store.managed_redis.authority } : {}

  # Variables for the scripts on every machine; the scripts add the passwords.
  machine = {
    CLUSTER     = var.cluster
    CONSTRAINTS = local.is_wheel ? module.bucket.releases["constraints-runtime.txt"] : ""
    PACKAGE     = local.is_wheel ? module.bucket.releases[basename(var.package)] : var.package
    PIP_OPTIONS = local.cpu_options
    PROJECT     = var.project
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
    VCASGD_CLUSTER     = var.cluster
    VCASGD_HEARTBEAT   = var.heartbeat
    VCASGD_HOME        = "/var/lib/vcasgd"
    VCASGD_JOB_USERS   = !local.managed
    VCASGD_RAY_ADDRESS = "${local.control_address}:${local.head_port}"
    VCASGD_STORAGE_URL = module.bucket.url
    VCASGD_STORE_ZONE  = local.zones[0]
  }

  public_address = local.public ? google_compute_address.api[0].address : null

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
      provider           = "gcp"
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
        project           = var.project
        instance_template = module.worker_template[name].path
        secrets           = { RAY_AUTH_TOKEN = module.identity.secrets["ray-token"] }
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
  }
}

# In another zone, the ledger's disk would be made again, empty.
resource "terraform_data" "zone" {
  input = local.zones[0]

  lifecycle {
    ignore_changes = [input]

    postcondition {
      condition     = self.output == local.zones[0]
      error_message = "zones: the ledger is in ${self.output}, so name it first. To move the cluster, destroy it first, or make another one in a workspace of its own, with another name in cluster."
    }
  }
}

module "bucket" {
  source = "../modules/gcp/bucket"

  name     = local.bucket_name
  location = var.region
  keep     = var.keep_bucket
  releases = local.releases
}

module "identity" {
  source = "../modules/gcp/identity"

  cluster = var.cluster
  project = var.project
  bucket  = module.bucket.name

  data_buckets = var.data_buckets
}

module "network" {
  source = "../modules/gcp/network"

  cluster    = var.cluster
  cidr       = var.network_cidr
  api_cidrs  = var.api_cidrs
  gateway    = var.gateway == null ? null : { cidrs = var.gateway.cidrs, port = var.gateway.port, acme = var.gateway.acme != null }
  accounts   = module.identity.accounts
  private    = var.private
  replicated = var.store.replicas > 0
}

module "store_data" {
  source   = "../modules/cloud-init"
  for_each = { for name in concat(local.node_names, local.replicas) : name => split("-", name) }

  role  = each.value[0]
  cloud = "gcp"
  machine = merge(local.machine, local.inside, {
    ADDRESS = local.store_addresses[each.key]
    NODE    = each.value[1]
  })
  settings = merge(local.settings, {
    VCASGD_NODE = each.value[1]
  })
  files = local.authority
}

module "store" {
  source = "../modules/gcp/store"

  private = var.private

  cluster           = var.cluster
  redis             = var.redis
  disk_gb           = var.ledger_disk_gb
  backup            = var.ledger_backup
  managed_memory_gb = var.managed_redis_gb

  place = {
    zone          = local.zones[0]
    network_id    = module.network.network_id
    subnetwork_id = module.network.subnetwork_id
    account       = module.identity.accounts["store"]
  }

  nodes = {
    machine_type = var.store.machine_type
    image        = var.image
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
  cloud = "gcp"
  machine = merge(local.machine, local.encryption, {
    PIP_OPTIONS  = local.pip_options[each.key]
    PIP_PACKAGES = join(" ", var.python_packages)
  })
  settings = { VCASGD_METADATA_URL = "http://metadata.google.internal", VCASGD_METADATA_KIND = "gcp" }
  files    = local.authority
}

module "worker_template" {
  source   = "../modules/gcp/worker-template"
  for_each = var.pools

  private = var.private

  cluster   = var.cluster
  pool      = each.key
  region    = var.region
  place     = { subnetwork_id = module.network.subnetwork_id, account = module.identity.accounts["worker"] }
  user_data = module.worker_data[each.key].user_data

  machine = {
    image        = coalesce(each.value.image, var.image)
    disk_gb      = coalesce(each.value.disk_gb, local.gpus[each.key] > 0 ? 100 : 30)
    default_type = local.machine_types[each.key][0]
    accelerator  = each.value.accelerator
    gpus         = local.gpus[each.key]
    secure_boot  = each.value.secure_boot
  }
}

resource "google_compute_address" "api" {
  count = local.public ? 1 : 0

  name   = "${var.cluster}-api"
  region = var.region
}

module "control_data" {
  source = "../modules/cloud-init"

  role  = "control-plane"
  cloud = "gcp"
  machine = merge(local.machine, local.inside, {
    ADDRESS            = local.control_address
    JOIN               = try(local.join.kind, "")
    ACME_NAME          = try(var.gateway.acme == null ? "" : var.gateway.host, "")
    ACME_EMAIL         = try(var.gateway.acme.email, "")
    ACME_SERVER        = try(coalesce(var.gateway.acme.server, ""), "")
    API_SUBJECT        = "IP:${local.open ? google_compute_address.api[0].address : "127.0.0.1"},DNS:localhost"
    LEDGER_DISK        = "ledger"
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
    local.authority,
    { "pools.yaml" = yamlencode({ pools = local.pools }) },
    var.prices == null ? {} : { "prices.yaml" = file(var.prices) },
  )
}

# The machines that the controller launches are not in Terraform's state. They are terminated by
# label, after the control plane, which could launch new ones, and before their network.
resource "terraform_data" "fleet" {
  input = {
    script  = "${path.module}/../../infra/fleet/terminate-gcp"
    cluster = var.cluster
    project = var.project
  }

  provisioner "local-exec" {
    when    = destroy
    command = "exec \"$SCRIPT\" \"$CLUSTER\" \"$PROJECT\""

    environment = {
      SCRIPT  = self.input.script
      CLUSTER = self.input.cluster
      PROJECT = self.input.project
    }
  }

  depends_on = [module.network, module.identity, module.worker_template]
}

module "control_plane" {
  source = "../modules/gcp/control-plane"

  private = var.private

  cluster        = var.cluster
  machine        = { type = var.control_plane_type, image = var.image }
  user_data      = module.control_data.user_data
  ledger_disk    = module.store.ledger_disk
  public_address = one(google_compute_address.api[*].address)

  place = {
    zone            = local.zones[0]
    subnetwork_id   = module.network.subnetwork_id
    private_address = local.control_address
    account         = module.identity.accounts["control"]
  }

  depends_on = [terraform_data.fleet]
}
