variable "cluster" {
  description = "Name of the cluster."
  type        = string
}

variable "machine" {
  description = "Type and image of the machine; the image is Ubuntu 24.04."
  type        = object({ type = string, image = string })
}

variable "place" {
  description = "Where it is: zone, subnetwork, its fixed private address, service account."
  type = object({
    zone            = string
    subnetwork_id   = string
    private_address = string
    account         = string
  })
}

variable "user_data" {
  description = "Its cloud-config."
  type        = string
}

variable "ledger_disk" {
  description = "Disk of a self-hosted ledger."
  type        = object({ self_link = optional(string), attached = bool })
}

variable "public_address" {
  description = "Its fixed public address; null: any."
  type        = string
  default     = null
}
