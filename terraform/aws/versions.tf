terraform {
  required_version = ">= 1.11, < 2.0"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = "~> 5.100"
    }
  }
}

provider "aws" {
  region = var.region

  # An emulator has neither accounts nor bucket host names.
  s3_use_path_style           = var.endpoint_url != null
  skip_credentials_validation = var.endpoint_url != null
  skip_metadata_api_check     = var.endpoint_url != null

  endpoints {
    dlm            = var.endpoint_url
    ec2            = var.endpoint_url
    elasticache    = var.endpoint_url
    iam            = var.endpoint_url
    s3             = var.endpoint_url
    secretsmanager = var.endpoint_url
    sts            = var.endpoint_url
  }
}
