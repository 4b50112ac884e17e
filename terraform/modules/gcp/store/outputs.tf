output "ledger_disk" {
  description = "The ledger's disk, where it is self-hosted."
  value       = one(google_compute_disk.ledger[*].self_link)
}

output "managed_redis" {
  description = "The managed ledger, where there is one: path, address, port and authority."
  value = one([
    for redis in google_redis_instance.ledger : {
      id        = redis.id
      address   = redis.host
      port      = redis.port
      authority = try(redis.server_ca_certs[0].cert, "")
    }
  ])
}
