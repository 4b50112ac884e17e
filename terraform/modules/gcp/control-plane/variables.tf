variable "cluster" {
  description = "Name of the cluster."
  type        = string
}

variable "machine" {
  description = "Type and image of the machine; the image is Ubuntu 24.04."
  type        = object({ type = string, image = string })
}

variable "place" {
  description = "Zone, subnetwork, fixed private address, and service account."
  type = object({
    zone            = string
    subnetwork_id   = string
    private_address = string
    account         = string
  })
}

variable "user_data" {
  description = "Cloud-config of the machine."
  type        = string
}

variable "ledger_disk" {
  description = "Disk that outlives the machine."
  type        = string
}

variable "public_address" {
  description = "Fixed public address. Null: any."
  type        = string
  default     = null
}

variable "private" {
  description = "Give the machines no public addresses."
  type        = bool
  default     = false
}
