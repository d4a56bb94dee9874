"""Target models behind one packed-rows forward."""
