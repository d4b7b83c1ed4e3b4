"""Commands about money: prices, invoices, and usage that waits for a decision."""
