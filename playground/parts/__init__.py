"""What several strategies share: token trees, verification rules, n-gram stores."""
