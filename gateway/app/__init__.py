"""The wiring of one worker: its application, its connections and its process."""
