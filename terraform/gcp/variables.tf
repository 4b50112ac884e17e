variable "project" {
  description = "Google Cloud project ID."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{4,28}[a-z0-9]$", var.project))
    error_message = "project must be a project ID, such as my-project-123."
  }
}

variable "cluster" {
  description = "Name of the cluster and prefix of all resources."
  type        = string
  default     = "vcasgd"

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,20}[a-z0-9]$", var.cluster)) && !can(regex("--|google|^goog", var.cluster))
    error_message = "cluster must be 3 to 22 lowercase letters, digits, and single dashes, start with a letter, and not contain google or start with goog."
  }
}

variable "region" {
  description = "Google Cloud region."
  type        = string
  default     = "us-central1"

  validation {
    condition     = can(regex("^[a-z]+-[a-z]+[0-9]+$", var.region))
    error_message = "region must be a region such as us-central1."
  }
}

variable "zones" {
  description = "Zones of the fleet. The first has the control plane and the store. Empty: the first three of the region."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for zone in var.zones : startswith(zone, "${var.region}-")])
    error_message = "zones: all must be in region; leave zones empty to use the first three of any region."
  }
}

variable "network_cidr" {
  description = "Address range of the network."
  type        = string
  default     = "10.80.0.0/20"
}

variable "api_cidrs" {
  description = "Networks that may reach the API by HTTPS. Empty: only through a tunnel."
  type        = list(string)
  default     = []

  validation {
    condition     = !contains(var.api_cidrs, "0.0.0.0/0")
    error_message = "api_cidrs: name only the networks that you use; the API has one token and is not built for the open internet."
  }
}

variable "package" {
  description = "Package that machines install: a wheel on this computer, or a pip requirement."
  type        = string

  validation {
    condition     = !endswith(var.package, ".whl") || fileexists(var.package)
    error_message = "package: no such file; build it with: pip wheel --no-deps --wheel-dir dist ."
  }
}

variable "pip_options" {
  description = "More pip options on the machines. Null: machines without GPUs get the CPU build of torch."
  type        = string
  default     = null
}

variable "python_packages" {
  description = "Packages that jobs import in addition to torch and numpy, as pip requirements; installed on workers."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for name in var.python_packages : can(regex("^[A-Za-z0-9][A-Za-z0-9._,<>=!~\\[\\]-]*$", name))])
    error_message = "python_packages must contain requirements without spaces, such as torchvision>=0.20."
  }
}

variable "data_buckets" {
  description = "Buckets with training data that workers may read, in addition to the cluster's own."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for name in var.data_buckets : can(regex("^[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]$", name))])
    error_message = "data_buckets must contain names of buckets, without a scheme or a path."
  }
}

variable "private" {
  description = "Give machines no public addresses. They reach package indexes through a NAT gateway, which is billed."
  type        = bool
  default     = false

  validation {
    condition     = !var.private || length(var.api_cidrs) == 0
    error_message = "private: the API of a private network is reached through the tunnel; leave api_cidrs empty."
  }
}

variable "tunnel_port" {
  description = "Port of this computer for the tunnel to the API. 8700 is that of a local stack."
  type        = number
  default     = 8701
}

variable "redis" {
  description = "Ledger: self-hosted (on a disk of the control plane) or managed (Memorystore with a replica)."
  type        = string
  default     = "self-hosted"

  validation {
    condition     = contains(["self-hosted", "managed"], var.redis)
    error_message = "redis must be self-hosted or managed."
  }
}

variable "managed_redis_gb" {
  description = "Memory of managed Redis."
  type        = number
  default     = 1
}

variable "ledger_disk_gb" {
  description = "Size in GB of the control plane's disk that outlives it, for a self-hosted ledger."
  type        = number
  default     = 10
}

variable "ledger_backup" {
  description = "Daily snapshots of a self-hosted ledger's disk: days to keep them (0: none), and one to restore from."
  type        = object({ days = optional(number, 7), restore = optional(string) })
  default     = {}

  validation {
    condition     = var.ledger_backup.days >= 0 && var.ledger_backup.days <= 365 && floor(var.ledger_backup.days) == var.ledger_backup.days
    error_message = "ledger_backup.days must be from 0 to 365."
  }
}

variable "tls" {
  description = "Encrypt the traffic with the ledger and the tensors servers, and Ray's. Managed Redis always encrypts."
  type        = bool
  default     = false
}

variable "control_plane_type" {
  description = "Machine type of the control plane."
  type        = string
  default     = "e2-medium"
}

variable "store" {
  description = "Number and machine type of the store nodes, and whether each has a second machine with a replica of its tensors server."
  type = object({
    nodes        = optional(number, 1)
    machine_type = optional(string, "e2-standard-2")
    replicas     = optional(number, 0)
  })
  default = {}

  validation {
    condition     = var.store.nodes >= 1 && var.store.nodes <= 64 && floor(var.store.nodes) == var.store.nodes
    error_message = "store.nodes must be from 1 to 64."
  }

  validation {
    condition     = contains([0, 1], var.store.replicas)
    error_message = "store.replicas must be 0 or 1."
  }
}

variable "image" {
  description = "Image of all machines: Ubuntu 24.04 on amd64, which has cloud-init."
  type        = string
  default     = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64"
}

variable "pools" {
  description = "Pools where workers are bought, by name, used in the order of their names. Null machine_types are common ones with 2 vCPUs and a price in the region; a null image or pip_options uses the cluster's; a null disk_gb is 30, or 100 with a GPU; a null secure_boot is off with a GPU."
  type = map(object({
    machine_types      = optional(list(string))
    spot               = optional(bool, true)
    zones              = optional(list(string))
    max_machines       = optional(number)
    labels             = optional(list(string), [])
    boot_seconds       = optional(number, 600)
    max_price_per_hour = optional(number)
    cpus               = optional(number)
    gpus               = optional(number)
    accelerator        = optional(object({ type = string, count = optional(number, 1) }))
    secure_boot        = optional(bool)
    image              = optional(string)
    pip_options        = optional(string)
    disk_gb            = optional(number)
  }))
  default = {
    gcp-spot = {
      max_machines = 8
    }
  }

  validation {
    condition     = length(var.pools) > 0 && alltrue([for name in keys(var.pools) : can(regex("^[a-z]([a-z0-9-]{0,12}[a-z0-9])?$", name))])
    error_message = "pools: define at least one; names have at most 14 lowercase letters, digits, and dashes."
  }

  validation {
    condition     = alltrue([for pool in values(var.pools) : pool.machine_types == null ? true : length(pool.machine_types) > 0])
    error_message = "pools: machine_types must name at least one type, or be left out."
  }

  validation {
    condition     = alltrue([for pool in values(var.pools) : alltrue([for zone in coalesce(pool.zones, []) : contains(var.zones, zone)])])
    error_message = "pools: the zones of a pool must be among the variable zones, so set zones too."
  }
}

variable "prices" {
  description = "File on this computer with prices that vcasgd's own tables lack. Null: use only those tables."
  type        = string
  default     = null

  validation {
    condition     = var.prices == null || can(yamldecode(file(var.prices)).gcp)
    error_message = "prices must be a YAML file with prices under the key gcp; docs/pools.md shows one."
  }
}

variable "heartbeat" {
  description = "Heartbeat in seconds; all timeouts of the platform derive from it."
  type        = number
  default     = 2

  validation {
    condition     = var.heartbeat > 0 && var.heartbeat <= 60
    error_message = "heartbeat must be more than 0 and at most 60 seconds."
  }
}

variable "keep_bucket" {
  description = "Make destroy refuse to delete a bucket with models in it. Apply false before a destroy that may delete it."
  type        = bool
  default     = true
}

variable "gateway" {
  description = "Port where machines elsewhere join the cluster. Null: none. See docs/deploy/gcp.md, Machines that join."
  type = object({
    # Networks that may reach it; 0.0.0.0/0 is everyone. The API is behind it, too.
    cidrs = list(string)
    port  = optional(number, 8790)
    # Pool of these machines, and its trust: own, or volunteer for strangers.
    pool  = optional(string, "volunteers")
    trust = optional(string, "own")
    # Name in DNS of the control plane. Without it, its address.
    host = optional(string)
    # Files on the control plane with a certificate of a known authority for host, and its key.
    # Without them, the control plane makes a certificate, whose fingerprint is in the tokens.
    certificate = optional(string)
    key         = optional(string)
    # Or a certificate for host by ACME, over port 80, which is open to everyone then. The default
    # server is that of Let's Encrypt, whose terms you accept.
    acme = optional(object({ email = string, server = optional(string) }))
  })
  default = null

  validation {
    condition     = var.gateway == null || try(length(var.gateway.cidrs) > 0 && alltrue([for cidr in var.gateway.cidrs : can(cidrhost(cidr, 0))]), false)
    error_message = "gateway.cidrs must contain networks such as 203.0.113.0/24, or 0.0.0.0/0 for everyone."
  }

  validation {
    condition     = var.gateway == null || try(var.gateway.port >= 1024 && var.gateway.port <= 9999 && floor(var.gateway.port) == var.gateway.port && !contains([6379, 8700], var.gateway.port), false)
    error_message = "gateway.port must be a port from 1024 to 9999 that no other service has (6379, 8700)."
  }

  validation {
    condition     = var.gateway == null || try(contains(["own", "volunteer"], var.gateway.trust), false)
    error_message = "gateway.trust must be own or volunteer."
  }

  validation {
    condition     = var.gateway == null || try(!contains(keys(var.pools), var.gateway.pool) && can(regex("^[a-z][a-z0-9-]{0,29}$", var.gateway.pool)), false)
    error_message = "gateway.pool must be a name in lowercase letters, digits, and dashes that no other pool has."
  }

  validation {
    condition     = var.gateway == null || try((var.gateway.certificate == null) == (var.gateway.key == null) && (var.gateway.certificate == null || var.gateway.host != null), false)
    error_message = "gateway: certificate needs key, and host, the name in the certificate."
  }

  validation {
    condition     = try(var.gateway.acme, null) == null || try(var.gateway.host != null && var.gateway.certificate == null && can(regex("^[A-Za-z0-9._+-]+@[A-Za-z0-9.-]+$", var.gateway.acme.email)) && can(regex("^(https://[A-Za-z0-9.:/_-]+)?$", coalesce(var.gateway.acme.server, "https://-"))), false)
    error_message = "gateway: acme needs host, an email, perhaps an https:// URL as server, and no certificate."
  }

  validation {
    condition     = var.gateway == null || try(alltrue([for text in [var.gateway.host, var.gateway.certificate, var.gateway.key] : text == null || can(regex("^[A-Za-z0-9._/-]+$", text))]), false)
    error_message = "gateway: host, certificate, and key must contain letters, digits, and . _ / - only."
  }

  validation {
    condition     = var.gateway == null || (!var.private && var.redis == "self-hosted")
    error_message = "gateway: a private network has no address to join at, and a managed ledger has no users of its own for the workers of others."
  }
}
