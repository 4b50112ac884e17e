variable "cluster" {
  description = "Name of the cluster."
  type        = string
}

variable "cidr" {
  description = "Address range of the network."
  type        = string

  validation {
    condition     = can(cidrsubnet(var.cidr, 4, 15)) && tonumber(split("/", var.cidr)[1]) <= 20
    error_message = "cidr must be an IPv4 network of /20 or larger, such as 10.80.0.0/16."
  }
}

variable "zones" {
  description = "Availability zones, with one subnet each. The first has the control plane."
  type        = list(string)

  validation {
    condition     = length(var.zones) >= 1 && length(var.zones) <= 15 && length(distinct(var.zones)) == length(var.zones)
    error_message = "zones must name one to fifteen different availability zones."
  }
}

variable "private" {
  description = "Give machines no public addresses; a NAT gateway in the first zone is their way out."
  type        = bool
  default     = false
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

variable "gateway" {
  description = "Networks that may reach the gateway, and its port. Null: no gateway."
  type        = object({ cidrs = list(string), port = number, acme = bool })
  default     = null
}
