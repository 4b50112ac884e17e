output "ledger_disk" {
  description = "Disk of the ledger, or of the API's certificate authority alone."
  value       = google_compute_disk.ledger.self_link
}

output "managed_redis" {
  description = "The managed ledger, or null: path, address, port, and certificate authority."
  value = one([
    for redis in google_redis_instance.ledger : {
      id        = redis.id
      address   = redis.host
      port      = redis.port
      authority = try(redis.server_ca_certs[0].cert, "")
    }
  ])
}

output "backup_days" {
  description = "Days for which snapshots of the ledger's disk are kept, or null."
  value       = one(google_compute_resource_policy.ledger[*].snapshot_schedule_policy[0].retention_policy[0].max_retention_days)
}
