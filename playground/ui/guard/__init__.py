"""What a visitor may cost: connections, requests, uploads, sessions."""
