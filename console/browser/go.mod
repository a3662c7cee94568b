module github.com/skeindb/skein/console/browser

go 1.26.0

replace github.com/skeindb/skein => ../../
