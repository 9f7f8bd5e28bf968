"""The native part under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer; see ``__main__``."""
