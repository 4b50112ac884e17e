variable "cluster" {
  description = "Name of the cluster."
  type        = string
}

variable "cidr" {
  description = "Address range of the network."
  type        = string

  validation {
    condition     = can(cidrhost(var.cidr, 163))
    error_message = "cidr must be an IPv4 network of /24 or larger, such as 10.80.0.0/20."
  }
}

variable "replicated" {
  description = "Let tensors servers and Sentinels of replicas reach each other."
  type        = bool
  default     = false
}

variable "api_cidrs" {
  description = "Networks that may reach the API. Empty: only through a tunnel."
  type        = list(string)

  validation {
    condition     = alltrue([for cidr in var.api_cidrs : can(cidrhost(cidr, 0))])
    error_message = "api_cidrs must contain networks such as 203.0.113.7/32."
  }
}

variable "private" {
  description = "Give machines no public addresses; a NAT gateway is their way out."
  type        = bool
  default     = false
}

variable "accounts" {
  description = "Email address of each role's service account: control, store, worker. Firewall rules use them."
  type        = object({ control = string, store = string, worker = string })
}

variable "gateway" {
  description = "Networks that may reach the gateway, and its port. Null: no gateway."
  type        = object({ cidrs = list(string), port = number, acme = bool })
  default     = null
}
