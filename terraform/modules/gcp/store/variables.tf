variable "cluster" {
  description = "Name of the cluster."
  type        = string
}

variable "redis" {
  description = "Location of the ledger: self-hosted (on the control plane's disk) or managed (Memorystore with a replica)."
  type        = string

  validation {
    condition     = contains(["self-hosted", "managed"], var.redis)
    error_message = "redis must be self-hosted or managed."
  }
}

variable "place" {
  description = "Zone, network, subnetwork, and service account of the store nodes."
  type = object({
    zone          = string
    network_id    = string
    subnetwork_id = string
    account       = string
  })
}

variable "disk_gb" {
  description = "Size of the ledger's disk."
  type        = number

  validation {
    condition     = var.disk_gb >= 10 && var.disk_gb <= 16384
    error_message = "disk_gb must be from 10 to 16384."
  }
}

variable "managed_memory_gb" {
  description = "Size of managed Redis."
  type        = number

  validation {
    condition     = var.managed_memory_gb >= 1 && var.managed_memory_gb <= 300
    error_message = "managed_memory_gb must be from 1 to 300."
  }
}

variable "backup" {
  description = "Daily snapshots of the ledger's disk: days to keep them (0: none), and one that a new disk is made from."
  type        = object({ days = number, restore = optional(string) })
}

variable "nodes" {
  description = "Store nodes and their replicas: type and image, and the address and user data of each."
  type = object({
    machine_type = string
    image        = string
    machines     = map(object({ address = string, user_data = string }))
  })
}

variable "private" {
  description = "Give the machines no public addresses."
  type        = bool
  default     = false
}
