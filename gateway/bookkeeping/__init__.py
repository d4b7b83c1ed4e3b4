"""Does the background work on money that belongs to a gateway process, such as daily agreement."""
