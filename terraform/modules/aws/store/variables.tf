variable "cluster" {
  description = "Name of the cluster."
  type        = string
}

variable "redis" {
  description = "Location of the ledger: self-hosted (on the control plane's disk) or managed (ElastiCache with a replica)."
  type        = string

  validation {
    condition     = contains(["self-hosted", "managed"], var.redis)
    error_message = "redis must be self-hosted or managed."
  }
}

variable "zone" {
  description = "Availability zone of the ledger's disk and of the store nodes."
  type        = string
}

variable "subnet_ids" {
  description = "Subnets of the network; the first one is in zone."
  type        = list(string)

  validation {
    condition     = length(var.subnet_ids) >= 1
    error_message = "subnet_ids must name at least one subnet."
  }
}

variable "security_groups" {
  description = "Security groups of the store nodes and of managed Redis."
  type        = object({ store = string, managed = string })
}

variable "disk" {
  description = "The ledger's disk: size in GB, and whether to keep a snapshot when it is destroyed."
  type        = object({ size_gb = number, final_snapshot = bool })

  validation {
    condition     = var.disk.size_gb >= 4 && var.disk.size_gb <= 16384
    error_message = "disk.size_gb must be from 4 to 16384."
  }
}

variable "managed_node_type" {
  description = "Size of managed Redis."
  type        = string

  validation {
    condition     = startswith(var.managed_node_type, "cache.")
    error_message = "managed_node_type must be a type such as cache.t4g.small."
  }
}

variable "backup" {
  description = "Daily snapshots of the ledger's disk: days to keep them (0: none), and one that a new disk is made from."
  type        = object({ days = number, restore = optional(string) })
}

variable "nodes" {
  description = "Store nodes and their replicas: type and image, instance profile, and the address and user data of each."
  type = object({
    instance_type = string
    image         = string
    profile       = string
    machines      = map(object({ address = string, user_data = string }))
  })
}
